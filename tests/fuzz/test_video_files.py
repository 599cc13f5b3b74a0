"""Files of videos, spoilt: each is decoded or refused, within its time and memory; the process may die of one."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from services.gateway.videos.video_process import MAX_MEMORY, VideoRefusal, VideoShape, decode_video
from shared.messages.model_card import VideoModel
from tests.fuzz.test_audio_files import outcomes, spoilt
from tests.support.models.tiny_videos import noise, video

SHARE, FULL = 60, 10_000
KINDS = (("mp4", "libx264"), ("mp4", "mpeg4"), ("webm", "libvpx"), ("webm", "libvpx-vp9"))


def valid_files() -> list[bytes]:
    return [video(noise(20, (48, 32)), 10, *kind) for kind in KINDS]


def outcome(file: bytes) -> str:
    """One word for what came of it."""
    first, *rest = decode_video(file, VideoModel())
    if isinstance(first, VideoRefusal):
        return "refused" if not rest else "wrong"
    assert isinstance(first, VideoShape)
    pairs = [each for each in rest if not isinstance(each, VideoRefusal)]
    size = 2 * 3 * first.width * first.height
    if len(rest) - len(pairs) > 1 or any(isinstance(each, VideoShape) or len(each.pixels) != size for each in pairs):
        return "wrong"
    if isinstance(rest[-1], VideoRefusal):
        return "refused"
    return "decoded" if len(pairs) == -(-len(first.times) // 2) else "wrong"


def check(found: Counter[str], count: int) -> None:
    print(dict(found))
    assert found.total() == count
    assert found["wrong"] == found["died of SIGALRM"] == 0
    assert found["decoded"] > count / 10 < found["refused"]


def test_spoilt_files_are_decoded_or_refused() -> None:
    files, rng = valid_files(), random.Random(1)
    check(outcomes([spoilt(files, rng) for _ in range(SHARE)], outcome, 2 * MAX_MEMORY), SHARE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_spoilt_files_are_decoded_or_refused() -> None:
    files, rng = valid_files(), random.Random(2)
    check(outcomes([spoilt(files, rng) for _ in range(FULL)], outcome, 2 * MAX_MEMORY), FULL)
