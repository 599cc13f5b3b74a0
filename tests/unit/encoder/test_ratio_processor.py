"""Images become the tiles and patches that the library's processor of LFM2-VL's makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from services.encoder.processors.ratio_processor import RatioProcessor
from tests.support.models.tiny_lfm_vl import SIZES, lfm_processor


def processor(folder: Path, **different: object) -> RatioProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps({**SIZES, **different}))
    return RatioProcessor(folder)


@pytest.mark.parametrize("different", [{}, {"use_thumbnail": False}, {"do_image_splitting": False}])
def test_patches_are_the_librarys(tmp_path: Path, different: dict[str, bool]) -> None:
    own, library = processor(tmp_path, **different), lfm_processor(**different)
    for high in (20, 28, 41, 60, 83, 168, 333):
        for wide in (24, 28, 70, 112, 140, 250):
            image = Image.effect_noise((wide, high), 90).convert("RGB")
            made, theirs = own(image), library(image, return_tensors="pt", return_row_col_info=True)
            for name in own.model_input_names:
                assert torch.equal(made[name], theirs[name]), (name, high, wide)
            assert made["tile_grid"].tolist() == [int(theirs["image_rows"][0]), int(theirs["image_cols"][0])]


def test_an_image_that_is_too_flat_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"400 times 7 pixels are \d+ patches; 16 are allowed"):
        processor(tmp_path, max_image_tokens=4)(Image.new("RGB", (400, 7)))


@pytest.mark.parametrize(
    ("different", "why"),
    [
        ({"tile_size": 0}, "tile_size 0 is not allowed; at least 1 is"),
        ({"max_tiles": 1}, "max_tiles has to be at least min_tiles, 2"),
    ],
)
def test_what_makes_no_tiles_is_an_error(tmp_path: Path, different: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        processor(tmp_path, **different)
