"""Causal attention of many new tokens per sequence over its paged keys and values, sequences of any lengths together.

One program takes a tile of neighbouring tokens with all query heads of one key head (GQA packed, so that short chunks
fill tiles and few tiles cross the diagonal) over all keys that they see: FlashAttention-2 (arXiv:2307.08691). Tiles
that every row sees need no masks; tiles that no row sees are not visited. The grid comes from `max_query` alone, a
number that the host has anyway: a map of tiles would save the programs of shorter sequences, which end at once, and
cost a copy to the device for every step. Where few rows meet a long context, as behind a prefix that was cached, the
context is cut in shares, as decodes' are.

FLOPs of a sequence of T tokens whose last n are computed, see `traffic.prefill_flops`:

    4 * H * D * n * (T - (n - 1) / 2)

Bytes that must move: n * H * D * itemsize twice and, as often as the second-level cache forgets them,
2 * T * KV * D * cache itemsize.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.gpu import generation
from services.worker.ops.triton.attention.paged_context import (
    LOG2_E,
    biases_of,
    cached_rows,
    cached_tile,
    merge_shares,
    queries_for,
    scaled_scores,
    store_share,
    with_sinks,
)
from services.worker.ops.triton.attention.tiles import padded, prefill_tile
from services.worker.ops.triton.products import dot


@triton.jit
def _over_tiles(
    state,
    query,
    position,
    caches,
    table,
    kv_head,
    begin,
    end,
    seen_from,
    scale,
    slope,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASKED: tl.constexpr,
    BLIND: tl.constexpr,
):
    """`state` (values mixed, greatest score, sum of chances) after the tiles of tokens from `begin` to `end`.

    MASKED: some rows do not see some of them, and no row those before `seen_from`; else every row sees whole tiles.
    BLIND: a row may have seen nothing after a tile.
    """
    mixed, most, total = state
    k_cache, v_cache = caches
    dims = tl.arange(0, PAD)
    for start in tl.range(begin, end, TILE):
        tokens = start + tl.arange(0, TILE)
        # What is not there may hold anything, NaN too: it is neither read nor multiplied.
        there = (tokens >= seen_from) & (tokens < end) if MASKED else None
        at = cached_rows(table, tokens, there, kv_head, KV_HEADS, BLOCK)[:, None] * DIM + dims[None, :]
        keys = cached_tile(k_cache, at, there, dims, DIM).to(query.dtype)
        values = cached_tile(v_cache, at, there, dims, DIM).to(query.dtype)
        scores = dot(query, tl.trans(keys), tl.zeros([query.shape[0], TILE], tl.float32))
        # Scaled within the power's own multiplication and addition, unless a cap comes between.
        factor = scale * LOG2_E
        if SOFTCAP is not None or ALIBI:
            scores = scaled_scores(scores, scale, SOFTCAP)
            factor = 1.0
        if ALIBI:
            scores += biases_of(slope, tokens[None, :] - position[:, None])
        if MASKED:
            seen = tokens[None, :] <= position[:, None]
            if WINDOW is not None:
                seen = seen & (tokens[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        newest = tl.maximum(most, tl.max(scores, 1) * factor)
        against = newest
        if BLIND:
            against = tl.where(newest == float("-inf"), 0.0, newest)
        shrink = tl.exp2(most - against)
        chances = tl.exp2(scores * factor - against[:, None])
        total = total * shrink + tl.sum(chances, 1)
        mixed = dot(chances.to(query.dtype), values, mixed * shrink[:, None])
        most = newest
    return mixed, most, total


@triton.jit
def _seen_tokens(oldest, end, split, splits, TILE: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """(where a program begins, where every row's window has begun, the first token that the `oldest` row sees, where
    the program ends). SPLIT: one of `splits` shares."""
    begin = oldest * 0
    seen_from = oldest * 0
    low = oldest * 0
    if WINDOW is not None:
        begin = tl.cdiv(tl.maximum(end - WINDOW, 0), TILE) * TILE
        seen_from = tl.maximum(oldest + 1 - WINDOW, 0)
        low = seen_from // TILE * TILE
    high = end
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end - low, splits), TILE) * TILE
        low = low + split * share
        high = tl.minimum(low + share, end)
    return low, begin, seen_from, high


@triton.jit(do_not_specialize=["width", "splits"], do_not_specialize_on_alignment=["tables", "starts", "lengths"])
def prefill_kernel(
    q,
    k_cache,
    v_cache,
    tables,
    starts,
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
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (key heads * chunks of PACK of their query heads, sequences, tiles of ROWS // PACK tokens * splits).

    Later tiles see more, so they come first: those that end last are short. Not SPLIT: writes `out` [n, H, D]. SPLIT:
    writes normalised `shares` [n, H, splits, D] and their log-sum-exps `weights` [n, H, splits], both float32.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    CHUNKS: tl.constexpr = (GROUP + PACK - 1) // PACK
    QUERIES: tl.constexpr = ROWS // PACK
    ALIBI: tl.constexpr = slopes is not None
    kv_head, sequence = tl.program_id(0) // CHUNKS, tl.program_id(1)
    first_row = tl.load(starts + sequence)
    rows = tl.load(starts + sequence + 1) - first_row
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    split = tile * 0
    if SPLIT:
        split, tile = tile % splits, tile // splits
    first = tile * QUERIES
    if first >= rows:
        return

    length = tl.load(lengths + sequence)
    packed = tl.arange(0, ROWS)
    token = first + packed // PACK
    of_group = tl.program_id(0) % CHUNKS * PACK + packed % PACK
    dims = tl.arange(0, PAD)
    owned = (packed < QUERIES * PACK) & (token < rows) & (of_group < GROUP)
    real = owned[:, None] & (dims < DIM)[None, :]
    head = (first_row + token).to(tl.int64) * HEADS + kv_head * GROUP + of_group
    row = head[:, None] * DIM + dims[None, :]
    query = queries_for(k_cache, tl.load(q + row, mask=real, other=0.0))

    position = length - rows + token
    oldest = length - rows + first
    end = tl.minimum(oldest + QUERIES, length)
    whole_end = (oldest + 1) // TILE * TILE
    if k_scale is not None:
        scale = scale * tl.load(k_scale)
    table = tables + sequence.to(tl.int64) * width
    caches = (k_cache, v_cache)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        most, total = with_sinks(sinks, kv_head * GROUP + of_group, of_group < GROUP, split == 0)
    slope = total
    if ALIBI:
        slope = tl.load(slopes + kv_head * GROUP + of_group, mask=of_group < GROUP, other=0.0)
    state = (tl.zeros([ROWS, PAD], tl.float32), most, total)
    low, begin, seen_from, high = _seen_tokens(oldest, end, split, splits, TILE, WINDOW, SPLIT)
    if WINDOW is not None:
        state = _over_tiles(
            *(state, query, position, caches, table, kv_head, low, tl.minimum(begin, high), seen_from, scale, slope),
            *(KV_HEADS, BLOCK, DIM, PAD, TILE, WINDOW, SOFTCAP, ALIBI, True, True),
        )
    begin = tl.maximum(begin, low)
    state = _over_tiles(
        *(state, query, position, caches, table, kv_head, begin, tl.minimum(whole_end, high), 0, scale, slope),
        *(KV_HEADS, BLOCK, DIM, PAD, TILE, WINDOW, SOFTCAP, ALIBI, False, False),
    )
    state = _over_tiles(
        *(state, query, position, caches, table, kv_head, tl.maximum(begin, whole_end), high, seen_from, scale, slope),
        *(KV_HEADS, BLOCK, DIM, PAD, TILE, WINDOW, SOFTCAP, ALIBI, True, SPLIT or WINDOW is not None),
    )
    mixed, most, total = state
    # Rows of padding may have seen nothing, and rows of a share.
    total = tl.where(total > 0.0, total, 1.0)
    mixed = mixed / total[:, None]
    if v_scale is not None:
        mixed = mixed * tl.load(v_scale)
    if SPLIT:
        store_share(shares, weights, head * splits + split, dims, mixed, most + tl.log2(total), real, owned, DIM)
    else:
        tl.store(out + row, mixed.to(out.dtype.element_ty), mask=real)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    max_query: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    splits: int = 1,
    first_row: int = 0,
    out: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """q [n, H, D], caches [num_blocks, KV, block_size, D] → [n, H * D], written to `out` where it is given.

    Sequence s owns the rows query_starts[s] to query_starts[s + 1], `max_query` at most, which are the last ones of its
    context_lens[s] cached tokens. Rows before `first_row` are nobody's, and left as they are in `out`; those from it on
    are somebody's. `splits`: see `prefill_splits`; any number gives the same within rounding. Caches of float8_e4m3fn
    hold keys / `k_scale` and values / `v_scale` (float32 [1], 1 where None). `sinks` and
    `alibi_slopes`: see `Ops.paged_attention`. Nothing is read from the device.
    """
    rows, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    tile = prefill_tile(
        *(dim, group * max_query, q.element_size(), k_cache.element_size(), window is not None, generation(q.device)),
        alibi=alibi_slopes is not None,
    )
    pack = min(group, tile.rows)
    out = q.new_empty(rows, heads * dim) if out is None else out
    split = splits > 1
    shares = q.new_empty(rows, heads, splits, dim, dtype=torch.float32) if split else q
    weights = q.new_empty(rows, heads, splits, dtype=torch.float32) if split else q
    grid = (kv_heads * -(-group // pack), len(context_lens), -(-max_query // (tile.rows // pack)) * splits)
    prefill_kernel[grid](
        q,
        k_cache,
        v_cache,
        block_tables,
        query_starts,
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
        HEADS=heads,
        KV_HEADS=kv_heads,
        BLOCK=k_cache.shape[2],
        DIM=dim,
        PAD=padded(dim),
        PACK=pack,
        ROWS=tile.rows,
        TILE=tile.tokens,
        WINDOW=window,
        SOFTCAP=softcap,
        SPLIT=split,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if split:
        own = slice(first_row, None)
        merge_shares(shares[own], weights[own], out[own], None, window=window, tile=tile.tokens)
    return out
