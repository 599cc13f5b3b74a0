"""When a device was where in its work: marks are set as steps are launched, and read when they are over.

A processor has computed a step when its launch returns, so the host's clock will do. On CUDA marks are events.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from services.worker.platforms.interface import Platform

_FRESH_SECONDS = 60.0
"""Events tell the time between them in single precision, so they are compared with one that is not much older."""


class Mark(Protocol):
    """A place in the device's work."""

    def passed(self) -> bool:
        """Whether the device has passed it; waits for nothing."""

    def wait(self) -> None:
        """Returns when the device has passed it."""

    def seconds_since(self, other: Mark) -> float:
        """From `other`, a mark of the same clock, set before. The device has passed both."""

    def when(self) -> float:
        """When the device passed it, which it has, on `time.perf_counter`'s clock."""


class StepClock(Protocol):
    """Sets marks in a device's work."""

    def mark(self) -> Mark:
        """Behind all that the device has been given."""


class HostMark:
    """A moment of the host, where a device is that computes when it is launched."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def passed(self) -> bool:
        """True: the host has been there."""
        return True

    def wait(self) -> None:
        """It is where the host was."""

    def seconds_since(self, other: Mark) -> float:
        """See `Mark.seconds_since`."""
        return self._at - other.when()

    def when(self) -> float:
        """The host's time then."""
        return self._at


class HostClock:
    """The clock of a device that computes when it is launched."""

    def mark(self) -> HostMark:
        """A mark of the present moment."""
        return HostMark()


class Event(Protocol):
    """What of `torch.cuda.Event` is used here."""

    def record(self) -> None:
        """Sets it behind all work on the current stream."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Waits until the device has reached the event."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to `end_event`."""


class CudaMark:
    """An event on a stream; see `Mark`."""

    def __init__(self, clock: CudaClock, event: Event, number: int) -> None:
        self._clock = clock
        self.event = event
        self.number = number
        """In the order in which marks were set."""
        event.record()

    def passed(self) -> bool:
        """Asks the device, and waits for nothing."""
        return self.event.query()

    def wait(self) -> None:
        """Blocks this thread until the device has passed it."""
        self._clock.wait(self)

    def seconds_since(self, other: Mark) -> float:
        """By the device's own time."""
        assert isinstance(other, CudaMark), "marks of one clock"
        return other.event.elapsed_time(self.event) / 1000

    def when(self) -> float:
        """On the host's clock; see `CudaClock`."""
        return self._clock.when(self)


class CudaClock:
    """Marks on the current stream. One that was awaited tells when on the host's clock the device passed it; others are
    that far from it. Threads may wait and ask beside the one that sets marks."""

    def __init__(
        self,
        enter: Callable[[], None],
        make_event: Callable[[], Event] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`enter` makes the device the current one of a thread, which is done before it waits for the first time: a
        thread begins with GPU 0, and what names no device would take memory there for a context."""
        self._enter = enter
        self._entered = threading.local()
        self._make_event = make_event or _timing_event
        self._now = now
        self._numbers = itertools.count()
        self._awaited: tuple[CudaMark, float] | None = None

    def mark(self) -> CudaMark:
        """An event behind all work on the current stream."""
        return CudaMark(self, self._make_event(), next(self._numbers))

    def wait(self, mark: CudaMark) -> None:
        """Blocks until the device has passed `mark`, and notes when that was where it can be known."""
        if not hasattr(self._entered, "here"):
            self._entered.here = True
            self._enter()
        late = mark.event.query()
        mark.event.synchronize()
        if not late or self._awaited is None:
            self._awaited = mark, self._now()

    def when(self, mark: CudaMark) -> float:
        """When the device passed `mark`, on the host's clock: as far as it is from one that was awaited."""
        now = self._now()
        if self._awaited is None:
            return now
        awaited, at = self._awaited
        then = min(now, at + _seconds(awaited, mark))
        if now - at > _FRESH_SECONDS:
            self._awaited = mark, then
        return then


def _seconds(from_mark: CudaMark, to_mark: CudaMark) -> float:
    """Below 0 where `to_mark` was set before the other one; events are asked in their order."""
    if to_mark.number < from_mark.number:
        return -from_mark.seconds_since(to_mark)
    return to_mark.seconds_since(from_mark)


def _timing_event() -> Event:
    event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def clock_of(platform: Platform) -> StepClock:
    """The clock of a rank's device."""
    return CudaClock(platform.activate) if platform.launches_ahead else HostClock()
