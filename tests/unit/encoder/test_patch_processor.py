"""Images become the patches that the library's processor of Kimi K2.5's makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from services.encoder.processors.patch_processor import PatchProcessor
from tests.support.models.tiny_kimi_vision import MOST, MOST_OF_A_SIDE, PATCH, kimi_processor

WRITTEN = {
    "size": {"max_height": MOST_OF_A_SIDE, "max_width": MOST_OF_A_SIDE},
    "max_patches": MOST,
    "patch_size": PATCH,
}
PUBLISHED = {"in_patch_limit": MOST, "patch_size": PATCH, "patch_limit_on_one_side": MOST_OF_A_SIDE}


def processor(folder: Path, written: dict[str, object]) -> PatchProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps(written))
    return PatchProcessor(folder)


@pytest.mark.parametrize("written", [WRITTEN, {"media_proc_cfg": {**PUBLISHED, "sample_fps": 2.0}}])
def test_patches_are_the_librarys(tmp_path: Path, written: dict[str, object]) -> None:
    own, library = processor(tmp_path, written), kimi_processor()
    for high in (1, 6, 7, 13, 27, 56, 83, 168, 333):
        for wide in (1, 9, 28, 41, 70, 112, 140, 250, 512):
            image = Image.effect_noise((wide, high), 90).convert("RGB")
            made, theirs = own(image), library(image, return_tensors="pt")
            assert made.keys() == theirs.keys()
            assert all(torch.equal(made[name], theirs[name]) for name in made), (high, wide)


def test_an_image_has_no_more_pixels_than_are_allowed(tmp_path: Path) -> None:
    own, row = processor(tmp_path, WRITTEN), 2 * PATCH
    for most in (row**2, 4 * row**2, 9 * row**2):
        own.size = {"shortest_edge": 1, "longest_edge": most}
        for size in ((90, 90), (30, 60), (250, 140), (14, 14)):
            assert len(own(Image.new("RGB", size))["pixel_values"]) * PATCH**2 <= most


def test_numbers_below_1_are_an_error(tmp_path: Path) -> None:
    for name in ("max_patches", "patch_size", "merge_size"):
        with pytest.raises(ValueError, match="are not allowed; each has to be at least 1"):
            processor(tmp_path, {**WRITTEN, name: 0})


def test_another_bound_of_one_side_is_an_error(tmp_path: Path) -> None:
    sides = {"max_height": MOST_OF_A_SIDE, "max_width": MOST_OF_A_SIDE + 1}
    with pytest.raises(ValueError, match=f"max_height {MOST_OF_A_SIDE} and max_width {MOST_OF_A_SIDE + 1} are not"):
        processor(tmp_path, {**WRITTEN, "size": sides})
