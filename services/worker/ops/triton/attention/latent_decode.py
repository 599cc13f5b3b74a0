"""Latent attention of one new token per sequence: flash-decoding with one head of keys for all query heads.

Or of one token that attends to chosen tokens alone, wherever they lie (DeepSeek sparse attention): a row of a prompt
then is what a decode is.

A program takes a chunk of the query heads and a share of the context. A tile of latents is read once and used twice, as
keys and as values; rotated keys add to the scores alone. Shares are cut and merged as those of `decode` are.

Bytes that must move, of S sequences whose contexts have T tokens together, where all heads are in one chunk:

    T * (R + P) * cache itemsize  +  S * H * (2 * R + P) * itemsize  (+ partials: 2 * S * splits * H * (R + 1) * 4)

and FLOPs: 2 * T * H * (2 * R + P), with latents of R elements and rotated keys of P.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.interface import LatentCache
from services.worker.ops.triton.attention.paged_context import (
    cached_rows,
    cached_tile,
    merge_shares,
    online_softmax,
    scaled_scores,
    share_of,
    store_share,
)
from services.worker.ops.triton.attention.tiles import Tile
from services.worker.ops.triton.products import dot

_ROWS = 16
"""Query heads of a program: what a tensor core takes at least, and as many sums of 512 as its registers hold."""


def latent_tile(itemsize: int) -> Tile:
    """Of 32 KiB of latents with 512 elements each, of which two are on their way at a time."""
    return Tile(_ROWS, 32 if itemsize <= 2 else 16, num_warps=4, num_stages=2)


@triton.jit(do_not_specialize=["width", "splits"], do_not_specialize_on_alignment=["tables", "lengths"])
def latent_decode_kernel(
    q,
    latents,
    rotated,
    tables,
    lengths,
    out,
    shares,
    weights,
    width,
    splits,
    scale,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    APART: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Grid (chunks of heads, splits, sequences). Rotated keys lie APART elements apart. CHOSEN: `tables` [S, width]
    int64 has the slots of each sequence's tokens, of which `lengths` count.

    Not SPLIT: writes `out` [S, H, RANK]. SPLIT: writes normalised `shares` [S, H, splits, RANK] and their log-sum-exps
    `weights` [S, H, splits], both float32, of the shares that have tokens.
    """
    split, sequence = tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    _, _, share = share_of(length, splits, TILE, None)
    begin = split * share
    end = tl.minimum(begin + share, length)
    if SPLIT:
        if begin >= end:
            return

    of_rank, of_rope = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = sequence.to(tl.int64) * HEADS + number
    from_q = q + head[:, None] * (RANK + ROPE)
    real = (number < HEADS)[:, None] & (of_rank < RANK)[None, :]
    absorbed = tl.load(from_q + of_rank[None, :], mask=real, other=0.0)
    rotation = tl.load(
        from_q + RANK + of_rope[None, :], mask=(number < HEADS)[:, None] & (of_rope < ROPE)[None, :], other=0.0
    )
    table = tables + sequence.to(tl.int64) * width
    state = (
        tl.zeros([ROWS, RANK_PAD], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
    )
    for start in tl.range(begin, end, TILE):
        tokens = start + tl.arange(0, TILE)
        there = tokens < end
        if CHOSEN:
            at = tl.load(table + tokens, mask=there, other=0)[:, None]
        else:
            at = cached_rows(table, tokens, there, 0, 1, BLOCK)[:, None]
        # What is not there may hold anything, NaN too: it is neither read nor multiplied.
        values = cached_tile(latents, at * RANK + of_rank[None, :], there, of_rank, RANK)
        keys = cached_tile(rotated, at * APART + of_rope[None, :], there, of_rope, ROPE)
        products = dot(absorbed, tl.trans(values), tl.zeros([ROWS, TILE], tl.float32))
        products = dot(rotation, tl.trans(keys), products)
        scores = tl.where(there[None, :], scaled_scores(products, scale, None), float("-inf"))
        state = online_softmax(state, scores, values)

    mixed, most, total = state
    # A padded sequence has no tokens: 0 / 1.
    mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    if SPLIT:
        at = head * splits + split
        store_share(shares, weights, at, of_rank, mixed, most + tl.log2(total), real, number < HEADS, RANK)
    else:
        tl.store(out + head[:, None] * RANK + of_rank[None, :], mixed.to(out.dtype.element_ty), mask=real)


def latent_decode(
    q: Tensor,
    cache: LatentCache,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    splits: int,
    chosen: bool = False,
) -> Tensor:
    """q [S, H, rank + rope_dim] → [S, H, rank] of the newest token of each sequence of `context_lens` cached tokens,
    its own among them; a length of 0 is a padded row and gives zeros. `splits`: any number gives the same within
    rounding. Nothing is read from the device.

    `chosen`: `block_tables` [S, count] int64 are the slots of the tokens that each of S rows attends to, the first
    `context_lens` of them.
    """
    (sequences, heads, _), (rank, rope_dim) = q.shape, (cache.latents.shape[3], cache.rotated.shape[3])
    tile = latent_tile(cache.latents.element_size())
    out = q.new_empty(sequences, heads, rank)
    split = splits > 1
    shares = q.new_empty(sequences, heads, splits, rank, dtype=torch.float32) if split else q
    weights = q.new_empty(sequences, heads, splits, dtype=torch.float32) if split else q
    latent_decode_kernel[(triton.cdiv(heads, tile.rows), splits, sequences)](
        *(q.contiguous(), cache.latents, cache.rotated, block_tables, context_lens, out, shares, weights),
        *(block_tables.shape[1], splits, scale),
        HEADS=heads,
        BLOCK=cache.latents.shape[2],
        RANK=rank,
        RANK_PAD=max(16, triton.next_power_of_2(rank)),
        ROPE=rope_dim,
        ROPE_PAD=max(16, triton.next_power_of_2(rope_dim)),
        APART=cache.rotated.stride(2),
        ROWS=tile.rows,
        TILE=tile.tokens,
        SPLIT=split,
        CHOSEN=chosen,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if split:
        merge_shares(shares, weights, out, context_lens, window=None, tile=tile.tokens)
    return out
