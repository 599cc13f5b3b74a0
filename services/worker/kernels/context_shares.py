"""Contexts cut into shares that different programs attend to, and what they found merged by its log-sum-exps.

Bytes that merging moves, of R rows: R * H * (splits * (D + 1) * 4 + D * itemsize).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.attention_tiles import padded
from services.worker.kernels.paged_tiles import BLOCK

MERGED_AT_ONCE = 32
"""Shares that the kernel loads at once: as many as most launches have."""


@triton.jit
def share_of(length, splits, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Of a sequence's newest token: (first token seen, where the shares begin, tokens of a share: whole tiles)."""
    first = length * 0
    if WINDOW is not None:
        first = tl.maximum(length - WINDOW, 0)
    low = first // BLOCK * BLOCK
    return first, low, tl.cdiv(tl.cdiv(length - low, splits), TILE) * TILE


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["lengths", "weights"])
def merge_kernel(
    shares,
    weights,
    lengths,
    out,
    splits,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Grid (H, R): one head's shares of one row, weighted by 2 to their log-sum-exps, to `out` [R, H, D].

    Where there are `lengths`, a row is the newest token of its sequence, and shares without tokens were not written.
    """
    row = tl.program_id(1)
    head = row.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    used = splits
    if lengths is not None:
        length = tl.load(lengths + row)
        _, low, share = share_of(length, splits, TILE, WINDOW)
        used = tl.cdiv(length - low, tl.maximum(share, 1))
    dims = tl.arange(0, PAD)
    mixed = tl.zeros([PAD], tl.float32)
    most, total = float("-inf"), 0.0
    for start in tl.range(0, used, AT_ONCE):
        split = start + tl.arange(0, AT_ONCE)
        there = split < used
        at = head * splits + split
        weight = tl.load(weights + at, mask=there, other=float("-inf"))
        part = tl.load(
            shares + at[:, None] * DIM + dims[None, :], mask=there[:, None] & (dims < DIM)[None, :], other=0.0
        )
        newest = tl.maximum(most, tl.max(weight, 0))
        # Shares of which the row sees nothing weigh nothing.
        against = tl.where(newest == float("-inf"), 0.0, newest)
        shrink, factor = tl.exp2(most - against), tl.exp2(weight - against)
        total = total * shrink + tl.sum(factor, 0)
        mixed = mixed * shrink + tl.sum(part * factor[:, None], 0)
        most = newest
    # A padded row has no shares: 0 / 1.
    mixed = mixed / tl.where(total > 0.0, total, 1.0)
    tl.store(out + head * DIM + dims, mixed.to(out.dtype.element_ty), mask=dims < DIM)


def merge_shares(
    shares: Tensor, weights: Tensor, out: Tensor, lengths: Tensor | None, *, window: int | None, tile: int
) -> None:
    """`shares` [R, H, splits, D] and their log-sum-exps `weights` [R, H, splits] in powers of two, float32 → `out`
    [R, H * D]. `lengths`, `window`, `tile`: those by which the shares were cut, see `share_of`; without lengths every
    share counts.
    """
    rows, heads, splits, dim = shares.shape
    merge_kernel[(heads, rows)](
        shares,
        weights,
        lengths,
        out,
        splits,
        DIM=dim,
        PAD=padded(dim),
        TILE=tile,
        WINDOW=window,
        AT_ONCE=MERGED_AT_ONCE,
        num_warps=4,
    )
