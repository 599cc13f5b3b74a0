"""A device that is late: its results are there after they were waited for, and not before."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.executor.timing import HostMark

POISON = 7_777_777
"""What is read too early."""


class LateMark(HostMark):
    def __init__(self, clock: LateClock) -> None:
        super().__init__()
        self._clock = clock
        self._copies = len(clock.copies)
        """Copies that were requested before it."""
        self._passed = False

    def passed(self) -> bool:
        """It is as late as possible: it is over only after it was waited for."""
        return self._passed

    def wait(self) -> None:
        self._passed = True
        self._clock.waits.append(self)
        with torch.inference_mode():
            for to, of in self._clock.copies[: self._copies]:
                to.copy_(of)


class LateClock:
    """Owns the copies that are on their way."""

    def __init__(self) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.waits: list[LateMark] = []

    def mark(self) -> LateMark:
        return LateMark(self)

    def to_host(self, tensor: Tensor) -> Tensor:
        """In place of `ops.transfer.to_host`."""
        coming = torch.full_like(tensor, POISON)
        self.copies.append((coming, tensor.clone()))
        return coming


class WithoutWaiting(TorchDispatchMode):
    """Refuses what a host would wait for: numbers out of tensors, copies of them that must be there, and shapes that
    depend on what tensors hold."""

    REFUSED = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "unique")

    def __enter__(self) -> WithoutWaiting:
        self._kept = torch.Tensor.cpu, torch.Tensor.tolist
        torch.Tensor.cpu = torch.Tensor.tolist = _refused  # type: ignore[method-assign]
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *exception: object) -> None:
        torch.Tensor.cpu, torch.Tensor.tolist = self._kept  # type: ignore[method-assign]
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.__name__.split(".")[0]
        assert name not in self.REFUSED, f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "how many are true?"
        return func(*args, **(kwargs or {}))


def _refused(tensor: Tensor, *words: object) -> Tensor:
    raise AssertionError("it waits for the device")
