"""Attention of a whole step: its decodes in one launch (or two), its prefills in another."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from services.worker.kernels.attention_tiles import (
    Tile,
    decode_splits,
    decode_tile,
    generation,
    prefill_splits,
    prefill_tile,
    sm_count,
)
from services.worker.kernels.decode_attention import decode_attention
from services.worker.kernels.prefill_attention import prefill_attention
from services.worker.ops import BatchMeta
from shared.blocks import BLOCK_SIZE


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: BatchMeta,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """See :meth:`services.worker.ops.Ops.paged_attention`. Caches [num_blocks, KV, BLOCK_SIZE, D], float8_e4m3fn too.

    A decode of no context is a padded row and gives zeros. How contexts are cut follows from numbers of the host alone
    (decodes, `meta.max_context`), so a captured graph holds for any contexts up to those it was captured with.
    """
    rows, heads, dim = q.shape
    out = q.new_empty(rows, heads * dim)
    if meta.num_decodes:
        decode_attention(
            q[: meta.num_decodes],
            k_cache,
            v_cache,
            meta.block_tables,
            meta.context_lens,
            scale=scale,
            window=window,
            softcap=softcap,
            splits=_decode_splits(q, k_cache, meta, window),
            out=out,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    if meta.prefills:
        prefill_attention(
            q,
            k_cache,
            v_cache,
            meta.block_tables[meta.num_decodes :],
            meta.query_starts[meta.num_decodes :],
            meta.context_lens[meta.num_decodes :],
            max_query=meta.max_query,
            scale=scale,
            window=window,
            softcap=softcap,
            splits=_prefill_splits(q, k_cache, meta, window),
            first_row=meta.num_decodes,
            out=out,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    return out


def _decode_splits(q: Tensor, k_cache: Tensor, meta: BatchMeta, window: int | None) -> int:
    _, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    tile = decode_tile(dim, heads // kv_heads, k_cache.element_size())
    # A window begins within a block.
    tokens = meta.max_context if window is None else min(meta.max_context, window + BLOCK_SIZE)
    return decode_splits(meta.num_decodes, heads, kv_heads, tokens, tile, sm_count(q.device))


def _prefill_splits(q: Tensor, k_cache: Tensor, meta: BatchMeta, window: int | None) -> int:
    _, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    sizes = q.element_size(), k_cache.element_size()
    most = meta.max_query * (heads // kv_heads)
    tile = prefill_tile(dim, most, *sizes, window is not None, generation(q.device))
    return _splits_of(meta.prefills, heads, kv_heads, tile, window, sm_count(q.device))


@lru_cache(maxsize=16)
def _splits_of(
    prefills: tuple[tuple[int, int], ...], heads: int, kv_heads: int, tile: Tile, window: int | None, sms: int
) -> int:
    """Remembered, as all layers of a step ask the same."""
    seen = [(count, context if window is None else min(context, window + count)) for count, context in prefills]
    return prefill_splits(seen, heads, kv_heads, tile, sms)
