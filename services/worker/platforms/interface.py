"""What a kind of device is to a rank. A package's is a subclass of `Platform`; see docs/plugins.md."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from msgspec import Struct

from services.worker.distributed.host_memory import SharedExchange
from services.worker.ops.interface import AttentionName, CacheDtype, Ops, OpsName, OpsUnavailable
from services.worker.ops.selector import OpsChoice, create_ops
from services.worker.ops.torch_ops import TorchOps

__all__ = [
    "CHOSEN_BY_PLATFORMS",
    "MemoryReading",
    "Ops",
    "OpsChoice",
    "OpsUnavailable",
    "Platform",
    "PlatformSettings",
    "TorchOps",
]

CHOSEN_BY_PLATFORMS = (
    *("dtype", "quantization", "max_model_len", "kv_memory", "kv_cache_dtype", "hybrid_kv_cache"),
    *("enforce_eager", "ops", "attention", "threads"),
)
"""Settings that no other process of an engine has to know of."""


class PlatformSettings(Struct, frozen=True, kw_only=True):
    """The settings that a platform may refuse; those in CHOSEN_BY_PLATFORMS it may change. All are of the worker's
    configuration, by the same names (docs/configuration.md)."""

    model: str
    world_size: int
    pp: int
    block_size: int
    max_num_seqs: int
    max_batch_tokens: int
    speculative: str | None
    lora: tuple[str, ...]
    kv_connector: str | None
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    quantization: Literal["auto", "int8", "int4", "fp8", "w8a8_int8", "w8a8_fp8"]
    max_model_len: int | None
    kv_memory: int | None
    kv_cache_dtype: CacheDtype
    hybrid_kv_cache: Literal["auto", "on", "off"]
    enforce_eager: bool
    ops: OpsName
    attention: AttentionName
    threads: int | None


class MemoryReading(NamedTuple):
    """A device's memory in bytes."""

    free: int
    """What could be had now."""
    own: int = 0
    """What this process is known to hold."""
    total: int = 0
    """Whoever holds it."""


class Platform(ABC):
    """One rank's device. What a subclass leaves as it is, is right for a device of PyTorch's that computes step by
    step: a step's tokens are read before the next step is launched."""

    name = ""
    """What `--device` calls it; a package's is that of the entry point."""
    operations: tuple[OpsName, ...] = ("torch",)
    """Of Baton's operations those that run there, the best first: `--ops auto` takes it where this machine has it, else
    PyTorch's."""
    process_group = "gloo"
    """The back ends by which torch.distributed sums tensors of this device and of main memory."""
    owns_memory = True
    """Whether its memory is there for the engine, which takes a share of all of it (`--gpu-memory-utilization`); else
    it belongs to others too, and less is taken."""
    profiled_rows: int | None = None
    """Rows of the step that is tried at the start, to see what memory it takes; None: as many as a step may have."""
    keeps_profile = False
    """Whether the next start may take what that step took from this one."""
    compiles = False
    """Whether a first step of each size takes long, so that all are tried at the start."""
    launches_ahead = False
    """Whether steps are launched while it computes the one before: it has the streams and events of `torch.cuda`."""
    captures_graphs = False
    """Whether decodes can be captured as graphs of `torch.cuda`."""

    def __init__(self, index: int) -> None:
        """`index`: which of this host's devices the rank computes on, below `device_count`."""
        self.index = index
        self.device = self.torch_device(index)

    @classmethod
    @abstractmethod
    def why_unavailable(cls) -> str | None:
        """Why there is no such device here; None: there is."""

    @classmethod
    def device_count(cls) -> int | None:
        """How many this host has, of which each rank of an engine has one to itself; None: ranks share one."""
        return None

    @abstractmethod
    def torch_device(self, index: int) -> torch.device:
        """What PyTorch calls it."""

    @property
    def device_name(self) -> str:
        """What its maker calls it."""
        return str(self)

    @property
    def in_main_memory(self) -> bool:
        """Whether its tensors are this process's memory."""
        return self.device.type == "cpu"

    def __str__(self) -> str:
        """For logs and reports: "cpu", "cuda:1"."""
        return self.name if self.device_count() is None else f"{self.name}:{self.index}"

    def check_settings(self, settings: PlatformSettings) -> PlatformSettings:
        """What to serve with. ValueError: the start ends with that text."""
        return settings

    def create_ops(self, choice: OpsChoice) -> Ops:
        """What a model's operations are computed by. Raises OpsUnavailable."""
        if choice.name not in ("auto", *self.operations):
            raise OpsUnavailable(f"ops = {choice.name}: on {self.name} there are auto, {', '.join(self.operations)}")
        return create_ops(choice, best=self.operations[0])

    def shared_exchange(self, ranks: int) -> SharedExchange | None:
        """How so many ranks exchange this device's tensors where they are on one host; None: as elsewhere, by
        `process_group`."""
        return None

    def pci_addresses(self) -> list[str] | None:
        """Of all such devices that this process sees, by index, as sysfs writes them: a rank is bound to processors
        beside its own. None: it is bound as one that computes on processors."""
        return None

    def activate(self) -> None:  # noqa: B027 - most devices have no such thing
        """Makes it this thread's current device."""

    def synchronize(self) -> None:  # noqa: B027 - what computes when it is launched need not wait
        """Returns when all that was launched is computed."""

    def empty_cache(self) -> None:  # noqa: B027 - who keeps nothing has nothing to give back
        """Gives back to the device what this process holds of its memory and does not use."""

    @abstractmethod
    def memory(self) -> MemoryReading:
        """Its memory now."""

    @abstractmethod
    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Runs `work`; how much more memory it took at its peak than was taken before."""
