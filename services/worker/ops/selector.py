"""Chooses the operations that a model runs on."""

from __future__ import annotations

import logging
from typing import assert_never

import torch

from services.worker.ops.interface import AttentionName, CacheDtype, Ops, OpsName, OpsUnavailable
from services.worker.ops.torch_ops import TorchOps

_log = logging.getLogger(__name__)


def create_ops(
    name: OpsName,
    device: torch.device,
    dtype: torch.dtype,
    cache: CacheDtype = "auto",
    attention: AttentionName = "auto",
) -> Ops:
    """The operations called `name`; `auto` is Triton's on a GPU and the native ones on a CPU where this machine can run
    them, else PyTorch's. `cache`: how keys and values are kept. `attention`: whose attention Triton's use.

    Raises OpsUnavailable where those asked for by name cannot be had, or keep no such keys and values.
    """
    ops = _ops_called(name, device, dtype, cache, attention)
    if cache == "fp8" and ops.name != "triton":
        raise OpsUnavailable(f"kv_cache_dtype = fp8: only Triton's kernels read such keys and values, not {ops.name}")
    if attention != "auto" and ops.name != "triton":
        raise OpsUnavailable(f"attention = {attention}: {ops.name} operations have an attention of their own")
    return ops


def _ops_called(
    name: OpsName, device: torch.device, dtype: torch.dtype, cache: CacheDtype, attention: AttentionName
) -> Ops:
    match name:
        case "torch":
            return TorchOps(device, dtype)
        case "native":
            return _native(device, dtype)
        case "triton":
            return _triton(device, dtype, cache, attention)
        case "auto":
            return _best(device, dtype, cache, attention)
        case _:
            assert_never(name)


def _best(device: torch.device, dtype: torch.dtype, cache: CacheDtype, attention: AttentionName) -> Ops:
    """The fastest operations for `device`."""
    try:
        return _native(device, dtype) if device.type == "cpu" else _triton(device, dtype, cache, attention)
    except OpsUnavailable as reason:
        if device.type != "cpu" and (cache != "auto" or attention != "auto"):
            raise  # PyTorch's have neither, whatever the reason; and that reason is what can be mended
        _log.info("only PyTorch's own operations are available: %s", reason)
        return TorchOps(device, dtype)


def _native(device: torch.device, dtype: torch.dtype) -> Ops:
    try:
        from services.worker.ops.native.native_ops import NativeOps
    except ImportError as error:
        raise OpsUnavailable(f"the native operations are not part of this installation ({error})") from None
    return NativeOps(device, dtype)


def _triton(device: torch.device, dtype: torch.dtype, cache: CacheDtype, attention: AttentionName) -> Ops:
    try:
        from services.worker.ops.triton_ops import TritonOps
    except ImportError as error:
        raise OpsUnavailable(f"Triton is not installed ({error})") from None
    return TritonOps(device, dtype, None if cache == "auto" else torch.float8_e4m3fn, attention)
