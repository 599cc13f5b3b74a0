"""Chooses the operations that a model runs on."""

from __future__ import annotations

import logging
from typing import NamedTuple, assert_never

import torch

from services.worker.ops.interface import AttentionName, CacheDtype, Ops, OpsName, OpsUnavailable
from services.worker.ops.torch_ops import TorchOps
from shared.blocks import DEFAULT_BLOCK_SIZE

_log = logging.getLogger(__name__)


def create_ops(
    name: OpsName,
    device: torch.device,
    dtype: torch.dtype,
    cache: CacheDtype = "auto",
    attention: AttentionName = "auto",
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> Ops:
    """The operations called `name`; `auto` is Triton's on a GPU and the native ones on a CPU where this machine can run
    them, else PyTorch's. `cache`: how keys and values are kept. `attention`: whose attention Triton's use.
    `block_size`: tokens of a block of keys and values.

    Raises OpsUnavailable where those asked for by name cannot be had, or keep no such keys and values.
    """
    ops = _ops_called(name, _Choice(device, dtype, cache, attention, block_size))
    if cache == "fp8" and ops.name == "torch":
        raise OpsUnavailable("kv_cache_dtype = fp8: PyTorch's own operations read no such keys and values")
    if attention != "auto" and ops.name != "triton":
        raise OpsUnavailable(f"attention = {attention}: {ops.name} operations have an attention of their own")
    return ops


class _Choice(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    cache: CacheDtype
    attention: AttentionName
    block_size: int

    @property
    def cache_dtype(self) -> torch.dtype | None:
        """Of keys and values, where it is not the weights'."""
        return None if self.cache == "auto" else torch.float8_e4m3fn

    def torch(self) -> Ops:
        return TorchOps(self.device, self.dtype, block_size=self.block_size)

    def native(self) -> Ops:
        try:
            from services.worker.ops.native.native_ops import NativeOps
        except ImportError as error:
            raise OpsUnavailable(f"the native operations are not part of this installation ({error})") from None
        return NativeOps(self.device, self.dtype, block_size=self.block_size, cache_dtype=self.cache_dtype)

    def triton(self) -> Ops:
        try:
            from services.worker.ops.triton_ops import TritonOps
        except ImportError as error:
            raise OpsUnavailable(f"Triton is not installed ({error})") from None
        return TritonOps(self.device, self.dtype, self.cache_dtype, self.attention, block_size=self.block_size)


def _ops_called(name: OpsName, choice: _Choice) -> Ops:
    match name:
        case "torch":
            return choice.torch()
        case "native":
            return choice.native()
        case "triton":
            return choice.triton()
        case "auto":
            return _best(choice)
        case _:
            assert_never(name)


def _best(choice: _Choice) -> Ops:
    """The fastest operations for the device."""
    on_cpu = choice.device.type == "cpu"
    try:
        return choice.native() if on_cpu else choice.triton()
    except OpsUnavailable as reason:
        if choice.cache != "auto" or (not on_cpu and choice.attention != "auto"):
            raise  # PyTorch's have neither, whatever the reason; and that reason is what can be mended
        _log.info("only PyTorch's own operations are available: %s", reason)
        return choice.torch()
