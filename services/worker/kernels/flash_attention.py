"""FlashAttention 3 behind our interface. Written to its documented interface; it has not run on a device yet.

FlashAttention 2 is of no use here: its pages must have a multiple of 256 tokens. FlashInfer would be: its caches are as
ours; but its `plan` reads lengths on the host, and so each step would wait for the device.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from services.worker.kernels.attention_tiles import HOPPER
from services.worker.ops import BatchMeta, OpsUnavailable


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
    ) -> Tensor:
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
