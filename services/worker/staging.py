"""How a step's rows reach the device: packed in one buffer, sent in one copy that nobody waits for.

Steps are launched ahead of the device (`backend.MOST_BEGUN`), so the page-locked buffers take turns: one is written
again only when what it held has left it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from services.worker.backend import MOST_BEGUN
from services.worker.ops import BatchMeta
from services.worker.rows import Int32s, Rows
from services.worker.rows_on_device import on_device, packed

_FIRST_CAPACITY = 1 << 16
"""Numbers that a buffer has room for at first; it doubles as batches and contexts ask for more."""


class Staging(Protocol):
    """Used from one thread."""

    def place(self, rows: Rows, logits_rows: Int32s) -> tuple[Tensor, BatchMeta]:
        """The rows' token ids [n] and the rest, on the device, in the order of its current stream.

        Both may be written to, and stay as they are until `place` has been called MOST_BEGUN times more.
        """


class Lane(Protocol):
    """A buffer on the host, and its counterpart on the device."""

    @property
    def host(self) -> Int32s: ...

    def settle(self) -> None:
        """Waits until all that was sent has left `host`."""

    def send(self, length: int) -> Tensor:
        """The first `length` numbers of `host` on the device, without waiting."""


class LaneMaker(Protocol):
    def __call__(self, capacity: int) -> Lane:
        """A lane of that many numbers."""


class PlainStaging:
    """For a device that computes when it is told to: nothing is in flight."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def place(self, rows: Rows, logits_rows: Int32s) -> tuple[Tensor, BatchMeta]:
        return on_device(rows, logits_rows, self._device)


class TurningStaging:
    """Owns lanes that take turns."""

    def __init__(self, make_lane: LaneMaker, turns: int = MOST_BEGUN) -> None:
        self._make_lane = make_lane
        self._lanes = [make_lane(_FIRST_CAPACITY) for _ in range(turns)]
        self._turn = 0

    def place(self, rows: Rows, logits_rows: Int32s) -> tuple[Tensor, BatchMeta]:
        together = packed(rows, logits_rows)
        lane = self._next(together.length)
        together.write(lane.host)
        return together.tensors(lane.send(together.length))

    def _next(self, length: int) -> Lane:
        """The next lane, settled, with room for `length` numbers."""
        turn = self._turn
        self._turn = (turn + 1) % len(self._lanes)
        lane = self._lanes[turn]
        lane.settle()
        if len(lane.host) < length:
            lane = self._lanes[turn] = self._make_lane(1 << (length - 1).bit_length())
        return lane


class CudaLane:
    """Page-locked memory and a copy on the current stream. The device's side needs no waiting: whoever reads it is on
    that stream, before the next copy."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self._pinned = torch.zeros(capacity, dtype=torch.int32, pin_memory=True)
        self._on_device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._left = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.host: Int32s = np.asarray(self._pinned.numpy())

    def settle(self) -> None:
        self._left.synchronize()  # one that was never recorded is over

    def send(self, length: int) -> Tensor:
        sent = self._on_device[:length]
        sent.copy_(self._pinned[:length], non_blocking=True)
        self._left.record()
        return sent


def staging_for(device: torch.device) -> Staging:
    """What suits `device`. Each user of it needs one of its own."""
    if device.type != "cuda":
        return PlainStaging(device)
    return TurningStaging(lambda capacity: CudaLane(device, capacity))
