"""What crosses between the event loop and the compute thread: plans in, in their order, and results out.

Knows no bus and no device.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from msgspec.structs import replace

from services.worker.backend import StepOutput
from shared.ids import Incarnation
from shared.messages.worker import StepPlan

MAX_QUEUED_PLANS = 64
"""Plans that may wait; a scheduler runs 3 ahead at the most, and one more for each further stage of a pipeline: a full
queue is a bug and raises."""


class PlanGap(NamedTuple):
    """A plan is missing: `expected` should have come, and did not."""

    expected: int


class PlanOrder:
    """Owns which plan must come next. (epoch, step) are consecutive; a new epoch begins with step 0."""

    def __init__(self) -> None:
        self.epoch: Incarnation | None = None
        self.expected = 0
        """Also how many plans of the epoch have arrived."""

    def record(self, plan: StepPlan) -> Literal["first", "next", "repeated"] | PlanGap:
        """Counts `plan` in. `first`: a new epoch, everything before it is void. After a gap only that can follow."""
        if plan.epoch != self.epoch:
            if plan.step:
                return PlanGap(0)
            self.epoch, self.expected = plan.epoch, 1
            return "first"
        if plan.step != self.expected:
            return "repeated" if plan.step < self.expected else PlanGap(self.expected)
        self.expected += 1
        return "next"


class QueuedPlan(NamedTuple):
    """A plan that waits to be computed."""

    plan: StepPlan
    first: bool
    """Whether it begins a new epoch."""
    arrived: float
    """When it came, on `time.perf_counter`'s clock."""


class ComputedPlan(NamedTuple):
    """A plan that was computed, or left out."""

    plan: StepPlan
    output: StepOutput | None
    """None: left out, its epoch was over."""
    ended: float = 0.0
    """When it was computed, on `time.perf_counter`'s clock."""


class UnreadResult(NamedTuple):
    """A plan that is computed, whose output is still to be read, which is done on the event loop."""

    plan: StepPlan
    read: Callable[[], StepOutput]
    """Gives the output, without waiting."""
    wait: float
    """Seconds that the device was idle before the plan came."""
    exposed: float
    """Seconds that preparing it held the device up, beside what the step says itself."""
    ended: float


class PlanQueue:
    """Owns the plans that wait, and the results that nobody has asked for yet. Made on the event loop; `submit` and
    `result` are called there, everything else on the threads that compute."""

    def __init__(self, *, skip_void: bool) -> None:
        """`skip_void`: leave out plans of an epoch that is over. Ranks that compute together may not: each must execute
        exactly what the others do."""
        self._skip_void = skip_void
        self._plans: queue.SimpleQueue[QueuedPlan | None] = queue.SimpleQueue()
        self.epoch: Incarnation | None = None
        """Of the plan that came last: transfers of any other epoch are awaited by nobody."""
        self._handed_over: deque[ComputedPlan | UnreadResult | BaseException] = deque()
        """No more than the plans that waited."""
        self._results: asyncio.Queue[ComputedPlan | UnreadResult | BaseException] = asyncio.Queue()
        self._notifier = Notifier(self._take_results)

    def submit(self, plan: StepPlan, *, first: bool) -> None:
        """Has `plan` executed after those before it; `first` begins a new epoch. Raises queue.Full."""
        self.epoch = plan.epoch
        # A queue.Queue counts for itself, at ten times the price; there is nobody else who puts anything in.
        if self._plans.qsize() >= MAX_QUEUED_PLANS:
            raise queue.Full
        self._plans.put(QueuedPlan(plan, first, time.perf_counter()))

    def end(self) -> None:
        """No plan comes behind those that wait. Raises queue.Full."""
        if self._plans.qsize() >= MAX_QUEUED_PLANS:
            raise queue.Full
        self._plans.put(None)

    def close(self) -> None:
        """Everything that computed has ended."""
        self._notifier.close()

    async def result(self) -> ComputedPlan:
        """The next plan's output, in the order of the plans. Raises what computing raised."""
        result = await self._results.get()
        if isinstance(result, UnreadResult):
            output = result.read()
            timing = output.timing
            timed = replace(timing, wait=result.wait + timing.wait, prepare=result.exposed + timing.prepare)
            return ComputedPlan(result.plan, replace(output, timing=timed), result.ended)
        if isinstance(result, BaseException):
            raise result
        return result

    def next_plan(self) -> QueuedPlan | None:
        """The next one, when it has come. None: there will be no more."""
        return self._plans.get()

    def is_void(self, queued: QueuedPlan) -> bool:
        """Whether the plan is to be left out, as a later epoch has begun."""
        return self._skip_void and queued.plan.epoch != self.epoch

    def hand_over(self, result: ComputedPlan | UnreadResult | BaseException) -> None:
        """Gives a result to whoever awaits `result`, in the order of the calls."""
        self._handed_over.append(result)
        self._notifier.notify()

    def _take_results(self) -> None:
        while self._handed_over:
            self._results.put_nowait(self._handed_over.popleft())


_MAX_NOTICES = 4096
"""Bytes that are read at a time: one call answers any number of notices."""

_write = ctypes.PyDLL(None).write  # of the C library; a PyDLL keeps the lock while it calls
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


class Notifier:
    """Wakes the event loop from another thread, which is not held up by it.

    Whatever may wait releases Python's global lock, and `call_soon_threadsafe` does, where it writes: the event loop
    wakes up, takes the lock, and is at work for some tenths of a millisecond while the device has nothing to do. Here
    the lock is kept while the byte is written, and released by the thread when it computes.

    Owns a pipe. Made on the event loop, where `callback` is called some time after each `notify`.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._called)

    def notify(self) -> None:
        """From any thread. A full pipe holds notices enough."""
        _write(self._writer, b"!", 1)

    def _called(self) -> None:
        os.read(self._reader, _MAX_NOTICES)
        self._callback()

    def close(self) -> None:
        """Nobody notifies any more."""
        self._loop.remove_reader(self._reader)
        os.close(self._reader)
        os.close(self._writer)
