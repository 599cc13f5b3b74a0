"""Attention over the paged cache for a whole step, and the choice of whose kernels compute it.

Ours take the decodes of a step in one launch (or two, where contexts are split) and its prefills in another.
FlashAttention 3 takes all in one, where it is installed and asked for.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Protocol, assert_never

import torch
from torch import Tensor

from services.worker.ops.gpu import HOPPER, generation, sm_count
from services.worker.ops.interface import AttentionName, BatchMeta, OpsUnavailable
from services.worker.ops.triton.attention.decode import decode_attention
from services.worker.ops.triton.attention.paged_context import ALIGNED
from services.worker.ops.triton.attention.prefill import prefill_attention
from services.worker.ops.triton.attention.tiles import Tile, decode_splits, decode_tile, prefill_splits, prefill_tile


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
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """See :meth:`services.worker.ops.interface.Ops.paged_attention`. Caches [num_blocks, KV, block_size, D],
    float8_e4m3fn too.

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
            sinks=sinks,
            alibi_slopes=alibi_slopes,
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
            splits=_prefill_splits(q, k_cache, meta, window, alibi_slopes is not None),
            first_row=meta.num_decodes,
            out=out,
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
        )
    return out


def _decode_splits(q: Tensor, k_cache: Tensor, meta: BatchMeta, window: int | None) -> int:
    _, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    tile = decode_tile(dim, heads // kv_heads, k_cache.element_size())
    # A window's first share begins a little before it.
    tokens = meta.max_context if window is None else min(meta.max_context, window + ALIGNED.value)
    return decode_splits(meta.num_decodes, heads, kv_heads, tokens, tile, sm_count(q.device))


def _prefill_splits(q: Tensor, k_cache: Tensor, meta: BatchMeta, window: int | None, alibi: bool) -> int:
    _, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    sizes = q.element_size(), k_cache.element_size()
    most = meta.max_query * (heads // kv_heads)
    tile = prefill_tile(dim, most, *sizes, window is not None, generation(q.device), alibi=alibi)
    return _splits_of(meta.prefills, heads, kv_heads, tile, window, sm_count(q.device))


@lru_cache(maxsize=16)
def _splits_of(
    prefills: tuple[tuple[int, int], ...], heads: int, kv_heads: int, tile: Tile, window: int | None, sms: int
) -> int:
    """Remembered, as all layers of a step ask the same."""
    seen = [(count, context if window is None else min(context, window + count)) for count, context in prefills]
    return prefill_splits(seen, heads, kv_heads, tile, sms)


# The choice: our kernels, or FlashAttention 3's.


_MIN_FLOAT8_CAPABILITY = (8, 9)
"""Compute capability: none before converts its numbers, and Triton refuses them when the first kernel is launched."""


class PagedAttention(Protocol):
    """What :meth:`services.worker.ops.interface.Ops.paged_attention` promises, of caches [num_blocks, KV, block_size,
    D]."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: BatchMeta,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """[n, H * D], see `Ops.paged_attention`."""


def create_attention(
    name: AttentionName, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype
) -> PagedAttention:
    """The attention called `name`; `auto` is ours, until measurements on a device say otherwise.

    Raises OpsUnavailable where what was asked for by name cannot be had.
    """
    match name:
        case "auto" | "triton":
            _check_cache(device, cache_dtype)
            return paged_attention
        case "flash-attn":
            return _flash_attention(device, dtype, cache_dtype)
        case _:
            assert_never(name)


def _check_cache(device: torch.device, dtype: torch.dtype) -> None:
    if dtype != torch.float8_e4m3fn or device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < _MIN_FLOAT8_CAPABILITY:
        needed, have = (".".join(map(str, version)) for version in (_MIN_FLOAT8_CAPABILITY, found))
        raise OpsUnavailable(f"kv_cache_dtype = fp8 needs a GPU of compute capability {needed}, {device} has {have}")


def _flash_attention(device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype) -> PagedAttention:
    from services.worker.ops.triton.attention.paged_attention import FlashAttention

    return FlashAttention(device, dtype, cache_dtype)


# FlashAttention 3 behind our interface. Written to its documented interface; it has not run on a device yet.
# FlashAttention 2 is of no use here: its pages must have a multiple of 256 tokens. FlashInfer would be, as its caches
# are laid out as ours; but its `plan` reads lengths on the host, and so each step would wait for the device.


class FlashAttention:
    """`flash_attn_with_kvcache` of flash_attn_interface (github.com/Dao-AILab/flash-attention, hopper/)."""

    def __init__(self, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
        """Raises OpsUnavailable where it is not installed or cannot be used."""
        if dtype not in (torch.float16, torch.bfloat16):
            raise OpsUnavailable(f"attention = flash-attn: FlashAttention knows float16 and bfloat16, not {dtype}")
        if cache_dtype != dtype:
            raise OpsUnavailable(f"attention = flash-attn: keys and values must be {dtype}, too, not {cache_dtype}")
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != HOPPER:
            raise OpsUnavailable("attention = flash-attn: FlashAttention 3 is for compute capability 9.0 alone")
        try:
            self._attend = import_module("flash_attn_interface").flash_attn_with_kvcache
        except (ImportError, AttributeError) as error:
            raise OpsUnavailable(f"attention = flash-attn: FlashAttention 3 is not installed ({error})") from None

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: BatchMeta,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """See `PagedAttention`. All in one launch; with sinks or slopes, which it does not know, by ours."""
        if sinks is not None or alibi_slopes is not None:
            return paged_attention(
                *(q, k_cache, v_cache, meta),
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                alibi_slopes=alibi_slopes,
            )
        out: Tensor = self._attend(
            q=q,
            # It takes tokens before heads, in whatever strides.
            k_cache=k_cache.transpose(1, 2),
            v_cache=v_cache.transpose(1, 2),
            cache_seqlens=meta.context_lens,
            page_table=meta.block_tables,
            cu_seqlens_q=meta.query_starts,
            max_seqlen_q=meta.max_query,
            softmax_scale=scale,
            causal=True,
            # (tokens seen before a row's own, tokens after it); without a bound: -1.
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap or 0.0,
        )
        return out.reshape(len(q), -1)
