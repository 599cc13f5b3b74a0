"""Chooses the operations that a model runs on."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, NamedTuple, assert_never

import torch

from services.worker.ops.interface import CACHE_DTYPES, AttentionName, CacheDtype, Ops, OpsName, OpsUnavailable
from services.worker.ops.torch_ops import TorchOps
from shared.blocks import DEFAULT_BLOCK_SIZE

if TYPE_CHECKING:
    from services.worker.ops.native.build import Level

_log = logging.getLogger(__name__)


class OpsChoice(NamedTuple):
    """Which operations are asked for, and for what."""

    name: OpsName
    device: torch.device
    dtype: torch.dtype
    """Of weights and activations."""
    cache: CacheDtype = "auto"
    """How keys and values are kept."""
    attention: AttentionName = "auto"
    """Whose attention Triton's operations use."""
    block_size: int = DEFAULT_BLOCK_SIZE
    """Tokens of a block of keys and values."""
    instructions: Level | None = None
    """Of native operations; None: the best of the machine."""

    @property
    def cache_dtype(self) -> torch.dtype | None:
        """Of keys and values, where it is not the weights'."""
        return CACHE_DTYPES.get(self.cache)

    def torch(self) -> TorchOps:
        """PyTorch's own."""
        return _copying_natively(TorchOps(self.device, self.dtype, block_size=self.block_size))

    def native(self) -> Ops:
        """C++ for CPUs. Raises OpsUnavailable."""
        try:
            from services.worker.ops.native.build import runnable_levels
            from services.worker.ops.native.native_ops import NativeOps
        except ImportError as error:
            raise OpsUnavailable(f"the native operations are not part of this installation ({error})") from None
        level = self.instructions
        if level is not None and level not in runnable_levels():
            raise OpsUnavailable(f"instructions = {level}: this machine has {', '.join(runnable_levels())}")
        return NativeOps(self.device, self.dtype, level=level, block_size=self.block_size, cache_dtype=self.cache_dtype)

    def triton(self) -> Ops:
        """Triton's kernels. Raises OpsUnavailable."""
        try:
            from services.worker.ops.triton_ops import TritonOps
        except ImportError as error:
            raise OpsUnavailable(f"Triton is not installed ({error})") from None
        made = TritonOps(self.device, self.dtype, self.cache_dtype, self.attention, block_size=self.block_size)
        return _copying_natively(made)


def _copying_natively(ops: TorchOps) -> TorchOps:
    """Blocks of a GPU pass the host's memory by the native library, where it is part of this installation."""
    with contextlib.suppress(ImportError):
        from services.worker.ops.native.native_kv import native_cells

        ops.make_cells = native_cells
    return ops


def create_ops(choice: OpsChoice, *, best: OpsName) -> Ops:
    """Those that are asked for; `auto`: the `best` of the device where this machine can run them, else PyTorch's.

    Raises OpsUnavailable where those asked for by name cannot be had, or keep no such keys and values.
    """
    ops = _best(choice, best) if choice.name == "auto" else _ops_called(choice.name, choice)
    unread: dict[str, tuple[CacheDtype, ...]] = {
        "torch": ("fp8", "int8_per_token_head"),
        "triton": ("int8_per_token_head",),
    }
    if choice.cache in unread.get(ops.name, ()):
        whose = "PyTorch's own" if ops.name == "torch" else "Triton's"
        raise OpsUnavailable(f"kv_cache_dtype = {choice.cache}: {whose} operations read no such keys and values")
    if choice.attention != "auto" and ops.name != "triton":
        raise OpsUnavailable(f"attention = {choice.attention}: {ops.name} operations have an attention of their own")
    if choice.instructions is not None and ops.name in ("torch", "triton"):
        raise OpsUnavailable(
            f"instructions = {choice.instructions}: only native operations have a choice, not {ops.name}"
        )
    return ops


def _ops_called(name: OpsName, choice: OpsChoice) -> Ops:
    match name:
        case "torch" | "auto":
            return choice.torch()
        case "native":
            return choice.native()
        case "triton":
            return choice.triton()
        case _:
            assert_never(name)


def _best(choice: OpsChoice, best: OpsName) -> Ops:
    """The fastest operations for the device."""
    try:
        return _ops_called(best, choice)
    except OpsUnavailable as reason:
        if choice.cache != "auto" or (best == "triton" and choice.attention != "auto") or choice.instructions:
            raise  # PyTorch's have none of these, whatever the reason; and that reason is what can be mended
        _log.warning("only PyTorch's own operations are available, which are slower: %s", reason)
        ops = choice.torch()
        ops.stands_in_because = str(reason)
        return ops
