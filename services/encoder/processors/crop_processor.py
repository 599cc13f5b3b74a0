"""Prepares images for Phi-4 Multimodal's tower: square crops of an image that was scaled onto whole ones, and all of it
before them.

As `Phi4MultimodalImageProcessor` of the library does, which asks for torchvision; scaled by Pillow.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import field
from torch import Tensor
from torch.nn.functional import interpolate

from services.encoder.processors.pixel_scale import RawPixels
from services.encoder.processors.square_tiles import TileSize, cut_into_tiles, tile_side
from shared.models.processor_files import read_processor

_BILINEAR = 2
"""Pillow's number of the filter that crops are scaled by, whatever a file says."""
_FILTERS = {0: "nearest", 2: "bilinear", 3: "bicubic"}
"""By Pillow's numbers, torch's names of those that the whole may be scaled by, once it is numbers."""
_LEAST = 10
"""Pixels of a side, on its crops."""
_ROWS_OF_THE_WHOLE, _LINES_OF_THE_WHOLE = 256, 16
"""The library counts so many, whatever a tower has; of a tower with others no image can be encoded."""


class _RawCrops(RawPixels, kw_only=True):
    size: TileSize = field(default_factory=lambda: TileSize(448, 448))
    patch_size: int = 14
    dynamic_hd: int = 36
    resample: int = 3


class _Laid(NamedTuple):
    """How an image lies on its crops."""

    columns: int
    lines: int
    width: int
    height: int
    """Of the image there; what is right of it and below is white."""


class CropProcessor:
    """Knows how large a crop is, and how many there may be. Stateless."""

    model_input_names = ("image_pixel_values",)

    def __init__(self, folder: Path) -> None:
        """Reads what counts of the files. Raises OSError, and ValueError for what is no JSON, for crops that are no
        squares of patches, for a filter that is not known."""
        raw = read_processor(folder, "image_processor", _RawCrops)
        self._side, self._patch, self._most = tile_side(raw.size, raw.dynamic_hd), raw.patch_size, raw.dynamic_hd
        if raw.patch_size < 1 or self._side % raw.patch_size:
            raise ValueError(f"the processor of images: patch_size {raw.patch_size} does not divide {self._side}")
        if raw.resample not in _FILTERS:
            allowed = ", ".join(map(str, _FILTERS))
            raise ValueError(f"the processor of images: resample {raw.resample} is not allowed; {allowed} are")
        self._filter, self._scale = _FILTERS[raw.resample], raw.scale()

    def __call__(self, image: Any, *, return_tensors: str = "pt") -> dict[str, Tensor]:
        """`image`: Pillow's. `image_pixel_values`: [1, 1 + crops, 3, side, side]; `image_sizes`: [[height, width]] of
        all crops; `image_attention_mask`: [1, 1 + crops, patches of a side, the same], 1 where the image is;
        `num_img_tokens`: [its rows]. Raises ValueError for an image that is too narrow."""
        laid = self._laid(image.width, image.height)
        width, height = laid.columns * self._side, laid.lines * self._side
        pixels = np.full((height, width, 3), 255, np.uint8)
        pixels[: laid.height, : laid.width] = np.asarray(image.resize((laid.width, laid.height), _BILINEAR))
        numbers, seen = self._scale.numbers(pixels), self._seen(laid)
        smooth: dict[str, Any] = {} if self._filter == "nearest" else {"align_corners": False, "antialias": False}
        whole = interpolate(numbers[None], size=(self._side, self._side), mode=self._filter, **smooth)
        patches = self._side // self._patch
        of_crops = cut_into_tiles(seen[None], patches)[:, 0]
        every_other = of_crops[:, ::2, ::2].sum()
        lines = of_crops.view(laid.lines, laid.columns, patches, patches)[:, 0, ::2, 0].sum()
        rows = _ROWS_OF_THE_WHOLE + 1 + int(every_other) + int(lines) + _LINES_OF_THE_WHOLE
        return {
            "image_pixel_values": torch.cat((whole, cut_into_tiles(numbers, self._side)))[None],
            "image_sizes": torch.tensor([[height, width]]),
            "image_attention_mask": torch.cat((torch.ones(1, patches, patches), of_crops))[None],
            "num_img_tokens": torch.tensor([rows]),
        }

    def _laid(self, wide: int, high: int) -> _Laid:
        columns, lines = -(-wide // self._side), -(-high // self._side)
        if columns * lines > self._most:
            columns, lines = self._nearest(wide, high)
        width, height = columns * self._side, lines * self._side
        across, down = width / wide, height / high
        laid = _Laid(columns, lines, width, int(high * across))
        if across >= down:
            laid = _Laid(columns, lines, int(wide * down), height)
        if min(laid.width, laid.height) < _LEAST:
            found = f"{laid.width} by {laid.height} pixels"
            raise ValueError(f"scaled to its crops it has {found}; each side has to have {_LEAST}")
        return laid

    def _nearest(self, wide: int, high: int) -> tuple[int, int]:
        """Columns and lines whose ratio is the nearest to the image's; of several the most that are half filled."""
        ratio, sides = wide / high, range(1, self._most + 1)
        found = ((columns, lines) for columns in sides for lines in sides if columns * lines <= self._most)
        best, nearest = (1, 1), math.inf
        for columns, lines in sorted(found, key=math.prod):
            off = abs(ratio - columns / lines)
            if off < nearest or (off == nearest and wide * high > 0.5 * self._side**2 * columns * lines):
                best, nearest = (columns, lines), off
        return best

    def _seen(self, laid: _Laid) -> Tensor:
        """[patches of all lines, of all columns]: 1, and 0 for those that lie beside the image."""
        patches = self._side // self._patch
        seen = torch.ones(laid.lines * patches, laid.columns * patches)
        right, below = laid.columns * self._side - laid.width, laid.lines * self._side - laid.height
        if right >= self._patch:
            seen[:, -(right // self._patch) :] = 0
        if below >= self._patch:
            seen[-(below // self._patch) :] = 0
        return seen
