"""Attention of one new token per sequence over its cached keys and values: flash-decoding.

One program takes all query heads of a key head (GQA packed: each key and value is read once) and a share of the
context; where the context is cut (`splits` > 1), a second kernel merges the shares by their log-sum-exp. A share is
computed on the device from the real context length, so that a graph captured for a long table is fair to a short one.
A few shares are merged by the last program of their sequence instead: what a launch takes is more than that.

Lengths and tables are read, and the first keys and values asked for, before the kernel before has ended: what that one
waited for has written them. They must not be what it writes itself.

Bytes that must move, of S sequences whose contexts (or windows) have T tokens together, see `traffic.decode_bytes`:

    2 * T * KV * D * cache itemsize  +  2 * S * H * D * itemsize  (+ partials: 2 * S * splits * H * (D + 1) * 4)

and FLOPs: 4 * T * H * D.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.gpu import sm_count
from services.worker.ops.triton.attention.paged_context import (
    biases_of,
    cached_rows,
    cached_tile,
    merge_shares,
    online_softmax,
    queries_for,
    scaled_scores,
    share_of,
    store_share,
    with_sinks,
)
from services.worker.ops.triton.attention.tiles import (
    MAX_ARRIVALS,
    MERGING_WARPS,
    decode_stages,
    decode_tile,
    merges_together,
    padded,
)
from services.worker.ops.triton.dependent_launch import LINE_BYTES, ask_for, launch_options, wait_for_inputs
from services.worker.ops.triton.products import dot


@triton.jit(do_not_specialize=["width", "splits"], do_not_specialize_on_alignment=["tables", "lengths"])
def decode_kernel(
    q,
    k_cache,
    v_cache,
    tables,
    lengths,
    out,
    shares,
    weights,
    width,
    splits,
    scale,
    k_scale,
    v_scale,
    sinks,
    slopes,
    arrived,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (key heads * chunks of their query heads, splits, sequences); heads vary fastest as they lie side by side.

    Not SPLIT: writes `out` [S, H, D]. SPLIT: writes normalised `shares` [S, H, splits, D] and their log-sum-exps
    `weights` [S, H, splits], both float32, of the shares that have tokens. Where there are counters `arrived` (zeros
    before and after, one for each sequence and chunk), the last program of these also merges them to `out`.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    CHUNKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head, split, sequence = tl.program_id(0) // CHUNKS, tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    first, low, share = share_of(length, splits, TILE, WINDOW)
    begin = low + split * share
    end = tl.minimum(begin + share, length)
    table = tables + sequence.to(tl.int64) * width
    if DEPENDENT:
        if begin < end:
            ask_for_tokens(k_cache, v_cache, table, begin, end, kv_head, KV_HEADS, BLOCK, DIM, PAD)
    wait_for_inputs(DEPENDENT)

    dims = tl.arange(0, PAD)
    of_group = tl.program_id(0) % CHUNKS * ROWS + tl.arange(0, ROWS)
    head = sequence.to(tl.int64) * HEADS + kv_head * GROUP + of_group
    real = (of_group < GROUP)[:, None] & (dims < DIM)[None, :]
    if SPLIT:
        if begin >= end:
            if arrived is not None:
                if length == 0:
                    nothing = tl.zeros([ROWS, PAD], out.dtype.element_ty)
                    tl.store(out + head[:, None] * DIM + dims[None, :], nothing, mask=real)
            return
    query = queries_for(k_cache, tl.load(q + head[:, None] * DIM + dims[None, :], mask=real, other=0.0))

    if k_scale is not None:
        scale = scale * tl.load(k_scale)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        most, total = with_sinks(sinks, kv_head * GROUP + of_group, of_group < GROUP, split == 0)
    slope = total
    if slopes is not None:
        slope = tl.load(slopes + kv_head * GROUP + of_group, mask=of_group < GROUP, other=0.0)
    mixed, most, total = _over_share(
        *((tl.zeros([ROWS, PAD], tl.float32), most, total), query, (k_cache, v_cache), table, kv_head),
        *(begin, end, first, length, scale, slope, KV_HEADS, BLOCK, DIM, TILE, WINDOW, SOFTCAP, slopes is not None),
    )
    # A padded sequence has no tokens: 0 / 1.
    mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    if v_scale is not None:
        mixed = mixed * tl.load(v_scale)
    if SPLIT:
        at = head * splits + split
        store_share(shares, weights, at, dims, mixed, most + tl.log2(total), real, of_group < GROUP, DIM)
        if arrived is not None:
            used = tl.cdiv(length - low, share)
            counter = arrived + sequence * tl.num_programs(0) + tl.program_id(0)
            tl.debug_barrier()  # all of the program's stores come before its arrival
            if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
                tl.store(counter, 0)
                mixed = merged(shares, weights, head * splits, used, of_group < GROUP, dims, DIM, ROWS, PAD)
                tl.store(out + head[:, None] * DIM + dims[None, :], mixed.to(out.dtype.element_ty), mask=real)
    else:
        tl.store(out + head[:, None] * DIM + dims[None, :], mixed.to(out.dtype.element_ty), mask=real)


@triton.jit
def _over_share(
    state,
    query,
    caches,
    table,
    kv_head,
    begin,
    end,
    first,
    length,
    scale,
    slope,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """`state` (as `online_softmax` has it) after the tokens from `begin` to `end`, none before `first` seen. A tile has
    a token that is."""
    k_cache, v_cache = caches
    dims = tl.arange(0, query.shape[1])
    for start in tl.range(begin, end, TILE):
        tokens = start + tl.arange(0, TILE)
        there = tokens < end
        if WINDOW is not None:
            there = there & (tokens >= first)
        at = cached_rows(table, tokens, there, kv_head, KV_HEADS, BLOCK)[:, None] * DIM + dims[None, :]
        # What is not there may hold anything, NaN too: it is neither read nor multiplied.
        keys = cached_tile(k_cache, at, there, dims, DIM).to(query.dtype)
        values = cached_tile(v_cache, at, there, dims, DIM).to(query.dtype)
        products = dot(query, tl.trans(keys), tl.zeros([query.shape[0], TILE], tl.float32))
        scores = scaled_scores(products, scale, SOFTCAP)
        if ALIBI:
            scores += biases_of(slope, tokens[None, :] - (length - 1))
        state = online_softmax(state, tl.where(there[None, :], scores, float("-inf")), values)
    return state


ASKED_TOKENS = tl.constexpr(32)
"""More of them were slower: the kernel before still reads, too."""


@triton.jit
def ask_for_tokens(
    k_cache,
    v_cache,
    table,
    begin,
    end,
    kv_head,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
):
    """Has the first keys and values of a share on their way. The table may be read before the kernel before has ended:
    it was written before that one began."""
    EACH: tl.constexpr = LINE_BYTES * 8 // k_cache.dtype.element_ty.primitive_bitwidth
    tokens = tl.minimum(begin + tl.arange(0, ASKED_TOKENS), end - 1)
    rows = cached_rows(table, tokens, None, kv_head, KV_HEADS, BLOCK)
    lines = tl.minimum(tl.arange(0, (PAD + EACH - 1) // EACH) * EACH, DIM - 1)
    at = rows[:, None] * DIM + lines[None, :]
    ask_for(k_cache + at, True)
    ask_for(v_cache + at, True)


@triton.jit
def merged(shares, weights, first, used, there, dims, DIM: tl.constexpr, ROWS: tl.constexpr, PAD: tl.constexpr):
    """The `used` shares from `first` [ROWS] on, which other programs have written, weighted by 2 to their log-sum-exps:
    [ROWS, PAD]. None of them is empty."""
    mixed = tl.zeros([ROWS, PAD], tl.float32)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for split in tl.range(0, used):
        at = first + split
        real = there[:, None] & (dims < DIM)[None, :]
        # Past the first-level cache, which knows nothing of what others write.
        weight = tl.load(weights + at, mask=there, other=0.0, cache_modifier=".cg")
        share = tl.load(shares + at[:, None] * DIM + dims[None, :], mask=real, other=0.0, cache_modifier=".cg")
        newest = tl.maximum(most, weight)
        shrink, factor = tl.exp2(most - newest), tl.exp2(weight - newest)
        total = total * shrink + factor
        mixed = mixed * shrink[:, None] + share * factor[:, None]
        most = newest
    return mixed / total[:, None]


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Counters, of all decodes on a device: those follow each other on one stream."""
    return torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=device)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    splits: int,
    out: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """q [S, H, D], caches [num_blocks, KV, block_size, D] → [S, H * D], written to `out` where it is given.

    Row s is the newest token of a sequence of context_lens[s] cached tokens, its own among them; a length of 0 is a
    padded row and gives zeros. Caches of float8_e4m3fn hold keys / `k_scale` and
    values / `v_scale` (float32 [1], 1 where None). `splits`: see
    `decode_splits`; any number gives the same within rounding. `sinks` and `alibi_slopes`: see `Ops.paged_attention`.
    Nothing is read from the device.
    """
    sequences, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    tile = decode_tile(dim, heads // kv_heads, k_cache.element_size())
    out = q.new_empty(sequences, heads * dim) if out is None else out
    split = splits > 1
    shares = q.new_empty(sequences, heads, splits, dim, dtype=torch.float32) if split else q
    weights = q.new_empty(sequences, heads, splits, dtype=torch.float32) if split else q
    chunks = -(-heads // kv_heads // tile.rows)
    grid = (kv_heads * chunks, splits, sequences)
    stages = decode_stages(tile, grid[0] * splits * sequences, sm_count(q.device))
    together = merges_together(tile, splits, grid[0] * sequences, stages)
    decode_kernel[grid](
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        out,
        shares,
        weights,
        block_tables.shape[1],
        splits,
        scale,
        k_scale,
        v_scale,
        sinks,
        alibi_slopes,
        _arrivals(q.device) if together else None,
        HEADS=heads,
        KV_HEADS=kv_heads,
        BLOCK=k_cache.shape[2],
        DIM=dim,
        PAD=padded(dim),
        ROWS=tile.rows,
        TILE=tile.tokens,
        WINDOW=window,
        SOFTCAP=softcap,
        SPLIT=split,
        num_warps=MERGING_WARPS if together else tile.num_warps,
        num_stages=stages,
        **launch_options(q.device),
    )
    if split and not together:
        merge_shares(shares, weights, out, context_lens, window=window, tile=tile.tokens)
    return out
