"""Prepares images for Llama 4's tower: tiles of a canvas on which the image lies, and the whole of it beside them.

As `Llama4ImageProcessor` of the library does, which asks for torchvision; scaled by Pillow. All of it in bfloat16, as
there, where pixels become numbers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import field
from torch import Tensor

from services.encoder.processors.pixel_scale import RawPixels
from services.encoder.processors.square_tiles import TileSize, cut_into_tiles, tile_side
from shared.models.processor_files import read_processor

Size = tuple[int, int]
"""Height and width."""


class _RawTiles(RawPixels, kw_only=True):
    size: TileSize = field(default_factory=lambda: TileSize(336, 336))
    max_patches: int = 16
    resize_to_max_canvas: bool = False


class TileProcessor:
    """Knows the sizes that a model's canvas may have. Stateless."""

    model_input_names = ("pixel_values",)

    def __init__(self, folder: Path) -> None:
        """Reads what counts of the files. Raises OSError, and ValueError for what is no JSON, for tiles that are no
        squares."""
        raw = read_processor(folder, "image_processor", _RawTiles)
        self._raw, self._side = raw, tile_side(raw.size, raw.max_patches)
        self._scale = raw.scale()
        self._canvases = canvases(raw.max_patches, self._side)

    def __call__(self, image: Any, *, return_tensors: str = "pt") -> dict[str, Tensor]:
        """`image`: Pillow's. `pixel_values`: [tiles, 3, side, side]; `aspect_ratios`: [[lines, columns]] of tiles."""
        canvas = best_canvas((image.height, image.width), self._canvases, largest=self._raw.resize_to_max_canvas)
        height, width = scaled_onto(
            (image.height, image.width), canvas, None if self._raw.resize_to_max_canvas else self._side
        )
        pixels = np.zeros((*canvas, 3), np.uint8)
        pixels[:height, :width] = np.asarray(image.resize((width, height), self._scale.resample))
        lines, columns = canvas[0] // self._side, canvas[1] // self._side
        tiles = cut_into_tiles(self._numbers(pixels), self._side)
        if lines * columns > 1:
            whole = self._numbers(np.asarray(image.resize((self._side, self._side), self._scale.resample)))
            tiles = torch.cat((tiles, whole[None]))
        return {"pixel_values": tiles, "aspect_ratios": torch.tensor([[lines, columns]])}

    def _numbers(self, pixels: np.ndarray[Any, Any]) -> Tensor:
        """[3, height, width]."""
        own = torch.from_numpy(pixels.copy()).permute(2, 0, 1).to(torch.bfloat16) * self._scale.factor
        mean, deviation = (
            torch.tensor(each, dtype=own.dtype)[:, None, None] for each in (self._scale.mean, self._scale.deviation)
        )
        return (own - mean) / deviation


def canvases(most: int, side: int) -> list[Size]:
    """Of up to `most` tiles, in the library's order, which decides between those that fit alike."""
    by_ratio: dict[float, list[Size]] = {}
    for count in range(most, 0, -1):
        for lines in (each for each in range(1, count + 1) if count % each == 0):
            by_ratio.setdefault(lines / (count // lines), []).append((lines * side, count // lines * side))
    return [each for sizes in by_ratio.values() for each in sizes]


def best_canvas(size: Size, found: list[Size], *, largest: bool) -> Size:
    """That on which an image of `size` is scaled up the least (`largest`: the most), or else down the least; of several
    the smallest one. In float32, as the library has it."""
    high, wide = map(np.float32, size)
    scales = [min(np.float32(each[0]) / high, np.float32(each[1]) / wide) for each in found]
    up = [scale for scale in scales if scale >= 1]
    chosen = (max(up) if largest else min(up)) if up else max(scales)
    return min((each for each, scale in zip(found, scales, strict=True) if scale == chosen), key=math.prod)


def scaled_onto(size: Size, canvas: Size, up_to: int | None) -> Size:
    """The size that an image of `size` is given on `canvas`, in its own proportions. `up_to`: pixels of a side beyond
    which it is not scaled up; None: as far as the canvas goes."""
    high, wide = size
    rooms: list[Any] = []
    for own, most in zip(size, canvas, strict=True):
        bound = most if up_to is None else max(own, up_to)
        rooms.append(bound if up_to is not None and bound <= most else np.float32(most))  # as there, a tensor's
    across, down = rooms[1] / wide, rooms[0] / high
    if across < down:
        made = min(math.floor(high * across), int(rooms[0])), int(rooms[1])
    else:
        made = int(rooms[0]), min(math.floor(wide * down), int(rooms[1]))
    return max(made[0], 1), max(made[1], 1)
