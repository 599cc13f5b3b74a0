"""Rows of images, and what is written among them, are what the library makes of the same files, kind by kind."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from services.encoder.image_process import DecodedImage, DecodingRequest, decode_image
from services.encoder.tower import ImageTower
from shared.messages.generation import PromptEmbeds
from tests.support.models.image_kinds import IMAGE_KINDS
from tests.support.models.tiny_gemma4 import make_gemma4_model
from tests.support.models.tiny_images import ImageModel, picture

OF_ONE_SIZE = ("deepseek", "deepseek-hybrid", "deepseek-ocr2", "vip-llava", "got-ocr2", "idefics2", "aria")
"""Whose images have as many rows, or nearly, whatever their size is."""
SIZES = ((150, 40), (40, 160), (20, 9), (28, 28), (500, 300), (7, 200))


MAKERS = {**IMAGE_KINDS, "gemma4-unified": partial(make_gemma4_model, kind="unified")}


@pytest.mark.parametrize("kind", [each for each in MAKERS if each not in ("ministral3", "mistral4")])
def test_rows_and_what_is_written_among_them_are_the_librarys(kind: str, tmp_path: Path) -> None:
    """But for those whose tower is Mistral 3's, by the same names."""
    model = MAKERS[kind](tmp_path)
    tower, counts = ImageTower(model.path), set[int]()
    close = {"rtol": 1e-4, "atol": 1e-4} if kind == "minimax-m3" else {}  # the library divides by 255 elsewhere
    for number, size in enumerate(each for each in SIZES if kind != "mistral-large-4" or max(each) > 28):
        image = picture(number, size)
        decoded = decode_image(DecodingRequest(image))
        assert isinstance(decoded, DecodedImage)
        made, expected = tower.encode(decoded), model.rows(image)
        rows = torch.frombuffer(bytearray(made.rows), dtype=torch.float32).view(-1, made.size)
        torch.testing.assert_close(rows, expected, **close)
        assert rows.std() > 0.1, "rows this flat would agree with anything"
        counts.add(len(rows))
        assert holds(ids_of(model, image), prompt_of(made, model))
    assert len(counts) > 1 or kind in OF_ONE_SIZE


def ids_of(model: ImageModel, image: bytes) -> list[int]:
    """The library's, of a chat with nothing else, with one token for whatever has a row."""
    shown = [{"role": "user", "content": [{"type": "image"}]}]
    ids: list[int] = model.ids_and_rows(shown, [image])["input_ids"][0].tolist()
    return [model.row_tokens[0] if each in model.row_tokens else each for each in ids]


def prompt_of(made: PromptEmbeds, model: ImageModel) -> list[int]:
    """The ids that stand for an image, by what an encoder answers."""
    ((first, count),) = made.runs
    written = {place + at: token for place, ids in made.texts for at, token in enumerate(ids)}
    end = max([first + count, *(place + 1 for place in written)])
    return [written.get(place, model.row_tokens[0]) for place in range(end)]


def holds(whole: list[int], part: list[int]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))
