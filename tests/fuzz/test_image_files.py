"""Files of images, spoilt: each is decoded or refused, within its time and memory, most of them behind their headers;
what is decoded has a size that models' processors take."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from services.encoder.image_process import (
    MAX_ASPECT,
    MAX_MEMORY,
    MAX_PIXELS,
    DecodedImage,
    DecodingRequest,
    decode_image,
)
from services.encoder.tower import ImageTower
from tests.fuzz.image_files import spoilt, valid_files
from tests.fuzz.test_audio_files import outcomes
from tests.support.models.tiny_qwen_vl import make_qwen_model

SHARE, FULL = 150, 10_000
MEMORY = 4 * MAX_MEMORY
"""Of the real process, beside what the test has itself."""
SHALLOW = ("not an image", "pixels are not allowed")
"""What is refused by a header alone."""


def seen(file: bytes) -> str:
    """One word for what came of it."""
    reply = decode_image(DecodingRequest(file))
    if not isinstance(reply, DecodedImage):
        return "header" if any(each in reply.message for each in SHALLOW) else "broken"
    size = reply.width * reply.height
    right = len(reply.pixels) == 3 * size <= 3 * MAX_PIXELS
    slim = max(reply.width, reply.height) <= MAX_ASPECT * min(reply.width, reply.height)
    return "decoded" if right and slim and size else "wrong"


def check(found: Counter[str], count: int) -> None:
    print(dict(found))
    assert found.total() == count
    assert set(found) <= {"header", "broken", "decoded"}, "nobody dies, and nothing is wrong"
    assert found["header"] < count / 4 < found["decoded"]
    assert found["broken"] > count / 10


def test_spoilt_files_are_decoded_or_refused() -> None:
    files, rng = valid_files(), random.Random(1)
    check(outcomes([spoilt(files, rng) for _ in range(SHARE)], seen, MEMORY), SHARE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_spoilt_files_are_decoded_or_refused() -> None:
    files, rng = valid_files(), random.Random(2)
    check(outcomes([spoilt(files, rng) for _ in range(FULL)], seen, MEMORY), FULL)


@pytest.mark.slow
def test_what_is_decoded_of_spoilt_files_becomes_rows(tmp_path: Path) -> None:
    tower, files, rng = ImageTower(make_qwen_model(tmp_path).path), valid_files(), random.Random(3)
    replies = [decode_image(DecodingRequest(spoilt(files, rng))) for _ in range(SHARE)]
    images = [each for each in replies if isinstance(each, DecodedImage)]
    assert len(images) > SHARE / 4
    assert all(tower.encode(each).count > 0 for each in images)
