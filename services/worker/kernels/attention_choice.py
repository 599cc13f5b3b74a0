"""Chooses whose kernels attend: ours, or FlashAttention 3's where it is installed."""

from __future__ import annotations

from typing import Protocol, assert_never

import torch
from torch import Tensor

from services.worker.kernels.attention import paged_attention
from services.worker.ops import BatchMeta, OpsUnavailable
from services.worker.ops_choice import AttentionName

_LEAST_FOR_FLOAT8 = (8, 9)
"""Compute capability: none before converts its numbers, and Triton refuses them when the first kernel is launched."""


class PagedAttention(Protocol):
    """What :meth:`services.worker.ops.Ops.paged_attention` promises, of caches [num_blocks, KV, BLOCK_SIZE, D]."""

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
    ) -> Tensor: ...


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
    if found < _LEAST_FOR_FLOAT8:
        needed, have = (".".join(map(str, version)) for version in (_LEAST_FOR_FLOAT8, found))
        raise OpsUnavailable(f"kv_cache_dtype = fp8 needs a GPU of compute capability {needed}, {device} has {have}")


def _flash_attention(device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype) -> PagedAttention:
    from services.worker.kernels.flash_attention import FlashAttention

    return FlashAttention(device, dtype, cache_dtype)
