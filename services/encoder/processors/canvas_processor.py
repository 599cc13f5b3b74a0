"""Prepares images for Command A Vision's tower: tiles of a canvas that an image fills, and the whole of it behind them.

As `Cohere2VisionImageProcessor` of the library does, which asks for torchvision; scaled by Pillow.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from msgspec import field
from torch import Tensor

from services.encoder.processors.pixel_scale import CLIP_DEVIATION, CLIP_MEAN, RawPixels, Triple
from services.encoder.processors.square_tiles import TileSize, cut_into_tiles, tile_side
from shared.models.processor_files import read_processor


class _RawCanvas(RawPixels, kw_only=True):
    size: TileSize = field(default_factory=lambda: TileSize(512, 512))
    crop_to_patches: bool = True
    max_patches: int = 12
    resample: int = 3
    image_mean: Triple = CLIP_MEAN
    image_std: Triple = CLIP_DEVIATION


class CanvasProcessor:
    """Knows how large a tile is, and how many there may be. Stateless."""

    model_input_names = ("pixel_values",)

    def __init__(self, folder: Path) -> None:
        """Reads what counts of the files. Raises OSError, and ValueError for what is no JSON, for tiles that are no
        squares."""
        raw = read_processor(folder, "image_processor", _RawCanvas)
        self._side = tile_side(raw.size, raw.max_patches)
        self._most = raw.max_patches if raw.crop_to_patches else 1
        self._scale = raw.scale()

    def __call__(self, image: Any, *, return_tensors: str = "pt") -> dict[str, Tensor]:
        """`image`: Pillow's. `pixel_values`: [tiles, 3, side, side]; `num_patches`: [tiles], the whole among them."""
        side = self._side
        columns, lines = self._tiles(image.width, image.height)
        tiles = cut_into_tiles(self._scale.scaled(image, columns * side, lines * side), side)
        if lines * columns > 1:
            tiles = torch.cat((tiles, self._scale.scaled(image, side, side)[None]))
        return {"pixel_values": tiles, "num_patches": torch.tensor([len(tiles)])}

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """Columns and lines: those for which an image is scaled up the least, or else down the least; of several the
        fewest."""
        sides = range(1, self._most + 1)
        found = sorted(((columns, lines) for columns in sides for lines in sides), key=math.prod)
        scales = {
            (columns, lines): min(columns * self._side / width, lines * self._side / height)
            for columns, lines in found
            if columns * lines <= self._most
        }
        up = {each: scale for each, scale in scales.items() if scale >= 1}
        return min(up, key=up.__getitem__) if up else max(scales, key=scales.__getitem__)
