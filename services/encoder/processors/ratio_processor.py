"""Prepares images for LFM2-VL's tower: one of a size of its own, or tiles of a grid of its proportions, in patches.

As `Lfm2VlImageProcessor` of the library does, which asks for torchvision; scaled by Pillow.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from services.encoder.processors.pixel_scale import RawPixels
from shared.models.processor_files import read_processor

Grid = tuple[int, int]
"""Columns and lines."""


class _RawRatios(RawPixels, kw_only=True):
    downsample_factor: int = 2
    do_image_splitting: bool = True
    min_tiles: int = 2
    max_tiles: int = 10
    use_thumbnail: bool = True
    min_image_tokens: int = 64
    max_image_tokens: int = 256
    encoder_patch_size: int = 16
    tile_size: int = 512
    max_pixels_tolerance: float = 2.0


class RatioProcessor:
    """Knows how many rows an image may have before it is cut, and which grids there are. Stateless."""

    model_input_names = ("pixel_values", "pixel_attention_mask", "spatial_shapes")

    def __init__(self, folder: Path) -> None:
        """Reads what counts of the files. Raises OSError, and ValueError for what is no JSON, for sizes below 1 and for
        tiles of which there is no number."""
        raw = read_processor(folder, "image_processor", _RawRatios)
        for name in ("downsample_factor", "encoder_patch_size", "tile_size", "min_image_tokens", "min_tiles"):
            if (found := getattr(raw, name)) < 1:
                raise ValueError(f"the processor of images: {name} {found} is not allowed; at least 1 is")
        for least, most in (("min_tiles", "max_tiles"), ("min_image_tokens", "max_image_tokens")):
            if getattr(raw, least) > getattr(raw, most):
                raise ValueError(f"the processor of images: {most} has to be at least {least}, {getattr(raw, least)}")
        self._raw, self._side = raw, raw.encoder_patch_size * raw.downsample_factor
        self._grids = grids(raw.min_tiles, raw.max_tiles)
        self._cuts = raw.do_image_splitting and raw.max_tiles > 1
        in_tile = (raw.tile_size // raw.encoder_patch_size) ** 2 if raw.do_image_splitting else 0
        self._patches = max(raw.max_image_tokens * raw.downsample_factor**2, in_tile)
        self._scale = raw.scale()

    def __call__(self, image: Any, *, return_tensors: str = "pt") -> dict[str, Tensor]:
        """`image`: Pillow's. `pixel_values`: [tiles, most patches, numbers], `pixel_attention_mask`: [tiles, most
        patches], `spatial_shapes`: [tiles, 2] lines and columns of patches; `tile_grid`: [lines, columns], of tiles.
        Raises ValueError for an image that is so flat that it has too many patches."""
        lines, columns, tiles = 1, 1, list[Tensor]()
        if cut := self._cuts and self._is_large(image.height, image.width):
            columns, lines = closest(image.width, image.height, self._grids, self._raw.tile_size)
            tiles += self._tiles(image, columns, lines)
        if not cut or (self._raw.use_thumbnail and lines * columns > 1):
            width, height = self._own_size(image.height, image.width)
            tiles.append(self._scale.scaled(image, width, height))
        patches = [self._patched(tile) for tile in tiles]
        if (most := max(map(len, patches))) > self._patches:
            raise ValueError(
                f"{image.width} times {image.height} pixels are {most} patches; {self._patches} are allowed"
            )
        side = self._raw.encoder_patch_size
        counts = torch.tensor([len(each) for each in patches])
        return {
            "pixel_values": torch.stack([pad(each, (0, 0, 0, self._patches - len(each))) for each in patches]),
            "pixel_attention_mask": (torch.arange(self._patches) < counts[:, None]).to(torch.int32),
            "spatial_shapes": torch.tensor([[tile.shape[1] // side, tile.shape[2] // side] for tile in tiles]),
            "tile_grid": torch.tensor([lines, columns]),
        }

    def _tiles(self, image: Any, columns: int, lines: int) -> list[Tensor]:
        side = self._raw.tile_size
        laid = self._scale.scaled(image, columns * side, lines * side)
        return [
            laid[:, line * side : (line + 1) * side, column * side : (column + 1) * side]
            for line in range(lines)
            for column in range(columns)
        ]

    def _patched(self, tile: Tensor) -> Tensor:
        """[patches, numbers] of [3, height, width]."""
        side = self._raw.encoder_patch_size
        return tile.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 3, 4, 0).flatten(2).flatten(0, 1)

    def _is_large(self, height: int, width: int) -> bool:
        least = self._raw.encoder_patch_size
        high, wide = (max(least, round(each / self._side) * self._side) for each in (height, width))
        return high * wide > self._raw.max_image_tokens * self._side**2 * self._raw.max_pixels_tolerance

    def _own_size(self, height: int, width: int) -> tuple[int, int]:
        """Width and height that an image has in whole rows, in its proportions and within what it may have."""
        side = self._side
        least, most = (each * side**2 for each in (self._raw.min_image_tokens, self._raw.max_image_tokens))
        high, wide = (max(side, round(each / side) * side) for each in (height, width))
        if high * wide > most:
            shrunk = math.sqrt(height * width / most)
            high, wide = (max(side, math.floor(each / shrunk / side) * side) for each in (height, width))
        elif high * wide < least:
            grown = math.sqrt(least / (height * width))
            high, wide = (math.ceil(each * grown / side) * side for each in (height, width))
        return wide, high


def grids(least: int, most: int) -> list[Grid]:
    """Of `least` to `most` tiles, in the library's order, which decides between those that fit alike."""
    found = [
        (wide, high)
        for count in range(least, most + 1)
        for wide in range(1, count + 1)
        for high in range(1, count + 1)
        if least <= wide * high <= most
    ]
    return sorted(set(found), key=math.prod)


def closest(width: int, height: int, found: list[Grid], side: int) -> Grid:
    """The grid whose proportions are nearest to those of an image; of several the last one that the image fills by more
    than half, else the first."""
    best, least = (1, 1), math.inf
    for grid in found:
        off = abs(width / height - grid[0] / grid[1])
        if off < least or (off == least and width * height > 0.5 * side**2 * math.prod(grid)):
            best, least = grid, off
    return best
