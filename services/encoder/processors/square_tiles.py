"""The squares that an image is cut into: tiles that towers see one by one, or patches that they embed."""

from __future__ import annotations

from msgspec import Struct
from torch import Tensor


class TileSize(Struct):
    """As files have it."""

    height: int
    width: int


def tile_side(size: TileSize, most: int) -> int:
    """The side of a tile, of which an image has at most so many. Raises ValueError for tiles that are no squares, and
    for none at all."""
    if size.height != size.width or size.height < 1 or most < 1:
        found = f"size {size.height} by {size.width} and max_patches {most}"
        raise ValueError(f"the processor of images: {found} are not allowed; at least one square tile is needed")
    return size.height


def cut_into_tiles(pixels: Tensor, side: int) -> Tensor:
    """[tiles, 3, side, side], line by line, of [3, height, width], which are multiples of `side`."""
    return pixels.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 0, 3, 4).flatten(0, 1)
