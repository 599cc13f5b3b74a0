"""What decode and prefill attention share on the device: where a tile of cached tokens lies, one step of softmax, and
contexts split between programs.

Softmax runs online (Milakov and Gimelshein, arXiv:1805.02867) and in powers of two, as `exp2` is one instruction:
callers have multiplied scores by log2(e). What the programs of a split context found is merged by its log-sum-exps.

Bytes that merging moves, of R rows: R * H * (splits * (D + 1) * 4 + D * itemsize).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.triton.dependent_launch import launch_options, wait_for_inputs
from services.worker.ops.triton.products import dot

ALIGNED = tl.constexpr(16)
"""Where a window begins its first share is rounded down to so many tokens, which divide a block of any size."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def cached_rows(table, tokens, there, kv_head, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Which rows of a cache, as [rows, D], hold `tokens` of the sequence whose table of blocks of BLOCK tokens
    this is (int64).

    `there`: for which of them the table may be read; None is all.
    """
    if there is None:
        blocks = tl.load(table + tokens // BLOCK)
    else:
        blocks = tl.load(table + tokens // BLOCK, mask=there, other=0)
    return (blocks.to(tl.int64) * KV_HEADS + kv_head) * BLOCK + tokens % BLOCK


@triton.jit
def cached_tile(cache, at, there, dims, DIM: tl.constexpr):
    """The elements `at` [tokens, dims] of a cache; zeros for tokens that are not `there`, and beyond DIM."""
    if there is None:
        if dims.shape[0] == DIM:
            tile = tl.load(cache + at)
        else:
            tile = tl.load(cache + at, mask=(dims < DIM)[None, :], other=0.0)
    elif dims.shape[0] == DIM:
        tile = tl.load(cache + at, mask=there[:, None], other=0.0)
    else:
        tile = tl.load(cache + at, mask=there[:, None] & (dims < DIM)[None, :], other=0.0)
    return tile


@triton.jit
def queries_for(cache, queries):
    """`queries` in the type in which they meet what is cached.

    Float8 widens to float16 by one instruction for two numbers, to bfloat16 by several slow ones for each. No query
    that means anything is beyond float16, and none within its range loses a bit that bfloat16 has.
    """
    if cache.dtype.element_ty.is_fp8():
        if queries.dtype == tl.bfloat16:
            queries = tl.clamp(queries.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return queries


@triton.jit
def scaled_scores(products, scale, SOFTCAP: tl.constexpr):
    """Scores as powers of two: q·k times `scale`, capped to ±SOFTCAP where there is one."""
    if SOFTCAP is None:
        scores = products * (scale * LOG2_E)
    else:
        # tanh(x) = 2 sigmoid(2x) - 1: exact enough in float32, and no call into a library.
        scores = (SOFTCAP * LOG2_E) * (2.0 * tl.sigmoid(products * (2.0 * scale / SOFTCAP)) - 1.0)
    return scores


@triton.jit
def biases_of(slope, ahead):
    """ALiBi's biases [rows, tokens] as powers of two: `ahead` is how far a token is ahead of a row, at most 0."""
    return (slope * LOG2_E)[:, None] * ahead.to(tl.float32)


@triton.jit
def with_sinks(sinks, heads, there, mine):
    """(greatest score as a power of two, sum of chances) of rows that saw nothing yet but their heads' sinks.

    A sink is counted once: by the program of the first share of a context, the one for which `mine` is true."""
    sink = tl.load(sinks + heads, mask=there, other=0.0) * LOG2_E
    most = tl.where(mine, sink, float("-inf"))
    return most, tl.where(mine, tl.zeros_like(sink) + 1.0, 0.0)


@triton.jit
def online_softmax(state, scores, values):
    """`state` (values mixed [rows, D], greatest score [rows], sum of chances [rows]) after a tile with `scores`
    [rows, tokens] as powers of two and `values` [tokens, D], of which every row sees a token."""
    mixed, most, total = state
    newest = tl.maximum(most, tl.max(scores, 1))
    shrink = tl.exp2(most - newest)
    chances = tl.exp2(scores - newest[:, None])
    total = total * shrink + tl.sum(chances, 1)
    mixed = dot(chances.to(values.dtype), values, mixed * shrink[:, None])
    return mixed, newest, total


@triton.jit
def store_share(shares, weights, at, dims, mixed, log_sum, real, there, DIM: tl.constexpr):
    """Writes what rows have found in one share of their context, where `merge_shares` reads it: number `at` [rows] of
    all shares. `real` [rows, D], `there` [rows]: of what is no padding."""
    tl.store(shares + at[:, None] * DIM + dims[None, :], mixed, mask=real)
    tl.store(weights + at, log_sum, mask=there)


MERGED_AT_ONCE = 32
"""Shares that the kernel loads at once: as many as most launches have."""
_MERGED_ELEMENTS = 32 * 256
"""What it holds in registers at the most: latents have more elements than heads."""


@triton.jit
def share_of(length, splits, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Of a sequence's newest token: (first token seen, where the shares begin, tokens of a share: whole tiles)."""
    first = length * 0
    if WINDOW is not None:
        first = tl.maximum(length - WINDOW, 0)
    low = first // ALIGNED * ALIGNED
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
    DEPENDENT: tl.constexpr,
):
    """Grid (H, R): one head's shares of one row, weighted by 2 to their log-sum-exps, to `out` [R, H, D].

    Where there are `lengths`, a row is the newest token of its sequence, and shares without tokens were not written.
    """
    wait_for_inputs(DEPENDENT)
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


def merged_pad(dim: int) -> int:
    """Elements of a tile of shares with `dim` each."""
    return max(16, 1 << (dim - 1).bit_length())


def merged_at_once(dim: int) -> int:
    """Shares that the kernel loads at once."""
    return min(MERGED_AT_ONCE, _MERGED_ELEMENTS // merged_pad(dim))


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
        PAD=merged_pad(dim),
        TILE=tile,
        WINDOW=window,
        AT_ONCE=merged_at_once(dim),
        num_warps=4,
        **launch_options(out.device),
    )
