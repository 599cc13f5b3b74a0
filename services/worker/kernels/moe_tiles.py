"""Shapes of the tiles of a mixture's products, by rows per expert, element size and generation of the GPU. Host only.

Chosen from what the compiler makes of them for sm_80 and sm_90 and by counting; not yet by measuring.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from services.worker.kernels.attention_tiles import HOPPER

TILE_ROWS = (16, 32, 64, 128)

_LINE = 32 * 16
"""Bytes that the 32 lanes of a warp read at once, 16 each."""


class ExpertTile(NamedTuple):
    """Of a product of some rows with some columns of one expert."""

    rows: int
    columns: int
    depth: int
    """Elements that are summed at a time."""
    swapped: bool
    """The weights are the product's first factor: a tensor core wants 64 rows of that, and few of the second."""
    num_warps: int
    num_stages: int


class RowTile(NamedTuple):
    """Of a row times some columns of its own expert, by one warp, without tensor cores."""

    columns: int
    depth: int


def one_by_one(rows: int, chosen: int, experts: int) -> bool:
    """Whether so few rows meet that next to no two share an expert: then each reads its own, unsorted."""
    return rows == 1 or rows * chosen * 4 <= experts


def up_row_tile(itemsize: int) -> RowTile:
    """Of the gates, and as many ups."""
    return RowTile(columns=2, depth=_LINE // itemsize)


def down_row_tile(itemsize: int) -> RowTile:
    """Of all chosen experts of a row, one behind the other: few columns, so that one row is work for the whole GPU."""
    return RowTile(columns=2, depth=_LINE // itemsize)


def tile_rows(picks: int, experts: int) -> int:
    """Rows of a tile where experts have so many picks together: twice what they have on average, or
    more, as far as there are such tiles."""
    average = picks / experts
    return next((rows for rows in TILE_ROWS if average <= rows / 2), TILE_ROWS[-1])


@cache
def expert_tile(rows: int, itemsize: int, generation: int, *, gated: bool) -> ExpertTile:
    """The tile of at most `rows` rows. `gated`: two matrices, gates and ups. `generation`: see `attention_tiles`."""
    hopper = generation >= HOPPER
    if itemsize == 4:
        # Products of float32 are three of TF32 each, out of twice the shared memory: for correctness, not for speed.
        return ExpertTile(min(rows, 32), 64, 32, rows <= 32, num_warps=4, num_stages=3)
    if rows <= 32:
        # Two programs fit on an SM of Hopper, each with two loads of 32 KiB, or three of 16, on their way.
        depth, stages = (128, 3) if rows <= 16 else (64, 4)
        return ExpertTile(rows, 64 if gated else 128, depth, True, num_warps=4, num_stages=stages)
    if rows == 64:
        return ExpertTile(rows, 128, 64, False, num_warps=4 if hopper else 8, num_stages=3)
    columns = (256 if hopper else 128) // (2 if gated else 1)
    return ExpertTile(rows, columns, 64, False, num_warps=8, num_stages=4 if hopper else 3)
