"""When a device was where in its work: marks are set as steps are launched, and read when they are over.

A device that computes when it is told to is where the host is, so the host's clock will do. On CUDA marks are events.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

_FRESH_SECONDS = 60.0
"""Events tell the time between them in single precision, so they are compared with one that is not much older."""


class Mark(Protocol):
    """A place in the device's work."""

    def wait(self) -> None:
        """Returns when the device has passed it."""

    def seconds_since(self, other: Mark) -> float:
        """From `other`, a mark of the same clock, set before. The device has passed both."""

    def when(self) -> float:
        """When the device passed it, which it has, on `time.perf_counter`'s clock."""


class StepClock(Protocol):
    def mark(self) -> Mark:
        """Behind all that the device has been given."""


class HostMark:
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def wait(self) -> None:
        """It is where the host was."""

    def seconds_since(self, other: Mark) -> float:
        return self._at - other.when()

    def when(self) -> float:
        return self._at


class HostClock:
    def mark(self) -> HostMark:
        return HostMark()


class CudaMark:
    def __init__(self, clock: CudaClock) -> None:
        self._clock = clock
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record()

    def wait(self) -> None:
        self._clock.wait(self)

    def seconds_since(self, other: Mark) -> float:
        assert isinstance(other, CudaMark), "marks of one clock"
        milliseconds: float = other.event.elapsed_time(self.event)
        return milliseconds / 1000

    def when(self) -> float:
        return self._clock.when(self)


class CudaClock:
    """Marks on the current stream. Knows when the device passed some mark on the host's clock: one that was awaited."""

    def __init__(self) -> None:
        self._awaited: tuple[CudaMark, float] | None = None

    def mark(self) -> CudaMark:
        return CudaMark(self)

    def wait(self, mark: CudaMark) -> None:
        late = mark.event.query()  # type: ignore[no-untyped-call]
        mark.event.synchronize()
        if not late or self._awaited is None:
            self._awaited = mark, time.perf_counter()

    def when(self, mark: CudaMark) -> float:
        now = time.perf_counter()
        if self._awaited is None:
            return now
        awaited, at = self._awaited
        then = min(now, at + mark.seconds_since(awaited))
        if now - at > _FRESH_SECONDS:
            self._awaited = mark, then
        return then


def clock_of(device: torch.device) -> StepClock:
    return CudaClock() if device.type == "cuda" else HostClock()
