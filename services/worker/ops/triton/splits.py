"""Products whose inputs are cut into splits, so that few tiles fill the device too: the program that is the last of a
tile's to end adds up what all of them have summed, in their order. So a sum has the same bits every time.

Bytes beside the product's: 2 · splits · rows · outputs · 4, through the second-level cache.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SPLITS = 4
MAX_TILES = 1 << 14
"""Of a product that is split."""


def splits_of(tiles: int, programs: int) -> int:
    """1, 2 or 4: the most that make `programs` of so many tiles, or fewer."""
    return min(MAX_SPLITS, 1 << max(0, (programs // tiles).bit_length() - 1))


def split_sums(out: Tensor, splits: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """For `out` [n, outputs]: memory of sums [splits, n, outputs], and how many of each tile's programs have ended,
    which the last one sets back to 0. Products on one device come one after the other, on one stream."""
    if splits == 1:
        return None, None
    return out.new_empty(splits, *out.shape, dtype=dtype), _arrived(out.device)


@cache
def _arrived(device: torch.device) -> Tensor:
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@triton.jit
def split_inputs(INPUTS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr):
    """(first, end) of this program's inputs: whole turns."""
    SHARE: tl.constexpr = (INPUTS + DEPTH * SPLITS - 1) // (DEPTH * SPLITS) * DEPTH
    first = tl.program_id(1) * SHARE
    return first, tl.minimum(first + SHARE, INPUTS)


@triton.jit
def store_split(total, sums, arrived, inside, size, SPLITS: tl.constexpr):
    """Whether this program is the last of its tile, after its sums are stored. size: elements of a split."""
    tl.store(sums + tl.program_id(1) * size, total, mask=inside)
    tl.debug_barrier()
    last = tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(arrived + tl.program_id(0), 0)
    return last


@triton.jit
def sum_splits(sums, inside, size, SPLITS: tl.constexpr, like):
    """The sums of all splits."""
    total = tl.zeros_like(like)
    for split in tl.static_range(SPLITS):
        # Other programs wrote them: not out of this multiprocessor's own cache.
        total += tl.load(sums + split * size, mask=inside, other=0, cache_modifier=".cg")
    return total
