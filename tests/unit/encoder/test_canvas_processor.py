"""Images become tiles of the canvas that the library's processor of Command A Vision's chooses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from services.encoder.processors.canvas_processor import CanvasProcessor
from tests.support.models.tiny_cohere_vision import command_processor
from tests.support.models.tiny_towers import MOST, SIDE


def processor(folder: Path, **written: object) -> CanvasProcessor:
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"size": {"height": SIDE, "width": SIDE}, "max_patches": MOST, **written})
    )
    return CanvasProcessor(folder)


def test_tiles_are_the_librarys(tmp_path: Path) -> None:
    own, library = processor(tmp_path), command_processor()
    for high in (1, 2, 13, 27, 28, 29, 56, 57, 84, 168, 333):
        for wide in (1, 9, 28, 30, 41, 56, 83, 112, 140, 200, 512):
            image = Image.effect_noise((wide, high), 90).convert("RGB")
            made, theirs = own(image), library(image, return_tensors="pt")
            assert torch.equal(made["pixel_values"], theirs["pixel_values"]), (high, wide)
            assert made["num_patches"].tolist() == theirs["num_patches"].tolist()


def test_an_image_may_be_one_tile(tmp_path: Path) -> None:
    made = processor(tmp_path, crop_to_patches=False)(Image.new("RGB", (500, 20)))
    assert made["pixel_values"].shape == (1, 3, SIDE, SIDE)


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ({"size": {"height": 0, "width": 0}}, "size 0 by 0"),
        ({"size": {"height": 28, "width": 56}}, "size 28 by 56"),
        ({"max_patches": 0}, "max_patches 0"),
    ],
)
def test_what_makes_no_tiles_is_an_error(tmp_path: Path, written: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"{named}.*; at least one square tile is needed"):
        processor(tmp_path, **written)
