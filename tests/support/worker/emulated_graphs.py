"""A device whose captures are run anew: what CUDA graphs do, on a CPU, with what they forbid forbidden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.graphs.capture import Replay

_WAIT = {
    "_local_scalar_dense": "a number is read from the device",
    "nonzero": "as many elements as the device finds",
    "masked_select": "as many elements as the device finds",
    "bincount": "as many elements as the device finds",
    "_unique2": "as many elements as the device finds",
    "repeat_interleave": "as many elements as the device says",
    "lift_fresh": "numbers are sent from the host",
}
"""Operations that wait for the device, or read what may be gone when a graph is replayed."""


class Forbidden(Exception):
    """Nothing of the kind can be captured."""


class _Capturing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _WAIT:
            raise Forbidden(f"{name}: {_WAIT[name]}")
        if name.startswith("index") and any(isinstance(arg, list | tuple) and _has_mask(arg) for arg in args):
            raise Forbidden(f"{name} by a mask: as many elements as the device finds")
        return func(*args, **(kwargs or {}))


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


class RunAgain:
    """See :class:`services.worker.graphs.capture.Capture`. A replay runs the work on the memory that it was captured
    with, whatever has become of the objects around it."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def capture(self, work: Callable[[], None]) -> Replay:
        """Raises Forbidden where a GPU could not capture it."""
        work()
        with _Capturing():
            work()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            work()

        return replay
