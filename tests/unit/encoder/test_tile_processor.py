"""Images become tiles of the canvas that the library's processor of Llama 4's chooses, as large as there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from services.encoder.processors.tile_processor import TileProcessor, best_canvas, canvases, scaled_onto
from tests.support.models.tiny_llama4 import MOST, SIDE, LibraryTiles


def test_an_image_lies_where_the_library_lays_it() -> None:
    library = LibraryTiles()
    for high in (1, 2, 7, 13, 27, 28, 29, 40, 55, 56, 57, 84, 100, 167, 168, 169, 333, 1000):
        for wide in (1, 3, 9, 14, 28, 30, 41, 56, 60, 83, 112, 140, 168, 200, 512, 999):
            canvas = best_canvas((high, wide), canvases(MOST, SIDE), largest=False)
            assert (canvas, scaled_onto((high, wide), canvas, SIDE)) == library.size((high, wide)), (high, wide)


@pytest.mark.parametrize("size", [(20, 30), (90, 40), (28, 28), (500, 500)])
def test_tiles_are_the_librarys(tmp_path: Path, size: tuple[int, int]) -> None:
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"size": {"height": SIDE, "width": SIDE}, "max_patches": MOST})
    )
    image = Image.effect_noise(size, 90).convert("RGB")
    own, theirs = TileProcessor(tmp_path)(image), LibraryTiles()(image)
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name].to(theirs[name].dtype), theirs[name]) for name in own)


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ({"size": {"height": 0, "width": 0}}, "size 0 by 0"),
        ({"size": {"height": 28, "width": 56}}, "size 28 by 56"),
        ({"max_patches": 0}, "max_patches 0"),
    ],
)
def test_what_makes_no_tiles_is_an_error(tmp_path: Path, written: dict[str, object], named: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=f"{named}.*; at least one square tile is needed"):
        TileProcessor(tmp_path)
