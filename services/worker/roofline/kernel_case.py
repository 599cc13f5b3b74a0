"""A kernel in one situation: what it must move, and calls of ours and of torch's own, each on memory of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.model.config import ModelConfig
from services.worker.ops import Ops
from services.worker.roofline.findings import Work
from services.worker.torch_ops import TorchOps

Call = Callable[[], object]

_COLD_BYTES = {"cpu": 128 << 20, "cuda": 256 << 20}
"""Memory that calls go through before they come back to the first: more than caches hold."""
_MOST_COPIES = 256


class NothingHere(Exception):
    """There is no kernel of a family to measure; the text says why."""


class KernelCase(NamedTuple):
    name: str
    work: Work
    """Of one call."""
    ours: list[Call]
    """The same on different memory, one after the other: in a model, too, nothing waits in the caches."""
    rival: list[Call]
    """Empty where torch has nothing of the kind, or ours is torch's."""
    rival_name: str = "torch"


Cases = Iterator[KernelCase]


class Situation(NamedTuple):
    """What kernels are measured for."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    ours: Ops
    torch_ops: TorchOps
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    room: int
    """Bytes that a case may take."""

    @property
    def implementations(self) -> tuple[Ops, ...]:
        """Ours, and torch's where ours is another."""
        return (self.ours,) if type(self.ours) is TorchOps else (self.ours, self.torch_ops)

    def copies(self, size: float) -> int:
        """Of memory that a call moves `size` bytes of."""
        wanted = math.ceil(_COLD_BYTES[self.device.type] / max(size, 1.0))
        return max(1, min(wanted, _MOST_COPIES, int(self.room / 4 / max(size, 1.0))))

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def products(self, ops: Ops, rows: int, width: int) -> Tensor:
        """[rows, width] as `ops` gives it out of a product."""
        return ops.linear(self.noise(rows, 16), ops.pack_linear(self.noise(width, 16), None))

    def calls(self, size: float, made: Callable[[Ops], Call]) -> tuple[list[Call], list[Call]]:
        """Of ours and of torch's: `made` gives one on memory of its own."""
        first, *others = [[made(ops) for _ in range(self.copies(size))] for ops in self.implementations]
        return first, others[0] if others else []
