"""Prepares images for Kimi K2.5's tower: as large as they are, with black on the right and below, in square patches.

As `Kimi_K25ImageProcessor` of the library does, which asks for torchvision; scaled by Pillow. Published files say under
`media_proc_cfg`, in words of their own, what the library writes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field
from torch import Tensor

from services.encoder.processors.pixel_scale import HALF, RawPixels, Triple
from services.encoder.processors.square_tiles import cut_into_tiles
from shared.models.processor_files import read_processor

_BICUBIC = 3


class _RawSides(Struct):
    max_height: int
    max_width: int


class _RawPublished(Struct):
    in_patch_limit: int = 16_384
    patch_limit_on_one_side: int = 512
    patch_size: int = 14
    merge_kernel_size: int = 2
    image_mean: Triple = HALF
    image_std: Triple = HALF


class _RawPatches(RawPixels, kw_only=True):
    media_proc_cfg: _RawPublished | None = None
    size: _RawSides = field(default_factory=lambda: _RawSides(512, 512))
    max_patches: int = 16_384
    patch_size: int = 14
    merge_size: int = 2
    resample: int = _BICUBIC

    def as_published(self) -> _RawPatches:
        """What counts of both."""
        if (own := self.media_proc_cfg) is None:
            return self
        most = own.patch_limit_on_one_side
        return _RawPatches(
            size=_RawSides(most, most),
            max_patches=own.in_patch_limit,
            patch_size=own.patch_size,
            merge_size=own.merge_kernel_size,
            image_mean=own.image_mean,
            image_std=own.image_std,
        )


class PatchProcessor:
    """Knows how many patches an image may have. Stateless but for `size`."""

    model_input_names = ("pixel_values", "image_grid_thw")

    def __init__(self, folder: Path) -> None:
        """Reads what counts of the files. Raises OSError, and ValueError for what is no JSON, for numbers below 1, and
        for two bounds of sides, which the library does not take, either."""
        raw = read_processor(folder, "image_processor", _RawPatches).as_published()
        self.patch_size, self.merge_size = raw.patch_size, raw.merge_size
        self._most, self._most_of_a_side = raw.max_patches, raw.size.max_height
        if min(self._most, self._most_of_a_side, self.patch_size, self.merge_size) < 1:
            found = f"{self.patch_size}, {self.merge_size}, {self._most} and {self._most_of_a_side}"
            raise ValueError(
                f"the processor of images: a patch's size, how many are merged, and how many an image and a side may "
                f"have: {found} are not allowed; each has to be at least 1"
            )
        if raw.size.max_width != self._most_of_a_side:
            found = f"max_height {self._most_of_a_side} and max_width {raw.size.max_width}"
            raise ValueError(f"the processor of images: size: {found} are not allowed; they have to be the same")
        self._scale = raw.scale()
        self.size = {"shortest_edge": 1, "longest_edge": (self._most_of_a_side * self.patch_size) ** 2}
        """Pixels of an image with its black; a larger one is scaled down further than the library does."""

    def __call__(self, image: Any, *, return_tensors: str = "pt") -> dict[str, Tensor]:
        """`image`: Pillow's. `pixel_values`: [patches, 3, side, side], line by line; `image_grid_thw`: [[1, lines,
        columns]]."""
        side = self.patch_size
        (height, width), (high, wide) = self._sizes(image.height, image.width)
        pixels = np.zeros((high, wide, 3), np.uint8)
        pixels[:height, :width] = np.asarray(image.resize((width, height), self._scale.resample))
        return {
            "pixel_values": cut_into_tiles(self._scale.numbers(pixels), side),
            "image_grid_thw": torch.tensor([[1, high // side, wide // side]]),
        }

    def _sizes(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of an image, and with its black."""
        limit = min(self._most, self.size["longest_edge"] // self.patch_size**2)
        own, padded = self._scaled(height, width, limit)
        while math.prod(padded) > self.size["longest_edge"] and limit > 1:
            limit = max(min(limit, math.prod(own) // self.patch_size**2) - 1, 1)
            own, padded = self._scaled(height, width, limit)
        return own, padded

    def _scaled(self, height: int, width: int, limit: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The same, of an image of at most `limit` patches: the library's `navit_resize`."""
        side, most = self.patch_size, self._most_of_a_side * self.patch_size
        patches = max(1.0, height // side) * max(1.0, width // side)
        scale = min(1.0, math.sqrt(limit / patches), most / height, most / width)
        high, wide = (min(max(1, int(each * scale)), most) for each in (height, width))
        row = self.merge_size * side
        return (high, wide), (-(-high // row) * row, -(-wide // row) * row)
