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


class QueuedPlan(NamedTuple):
    """A plan that waits to be computed."""

    plan: StepPlan
    first: bool
    """Whether it begins a new epoch."""
    arrived: float
    """When it came, on `time.perf_counter`'s clock."""
    void: bool = False
    """Whether it is to be left out, as a later epoch has begun."""


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


Result = ComputedPlan | UnreadResult | BaseException
"""Of one plan; or what computing raised, which ends the thread."""


class PlanQueue:
    """Owns the plans that wait, which must come next, and the results that nobody has asked for yet. Made on the event
    loop; `submit` is called there, everything else on the threads that compute."""

    def __init__(self, *, skip_void: bool) -> None:
        """`skip_void`: leave out plans of an epoch that is over. Ranks that compute together may not: each must execute
        exactly what the others do."""
        self._skip_void = skip_void
        self._plans: queue.SimpleQueue[QueuedPlan | None] = queue.SimpleQueue()
        self.epoch: Incarnation | None = None
        """Epoch of the newest plan. Nobody waits for transfers of another epoch."""
        self.expected = 0
        """The number of the step that must come next, which is how many plans of the epoch have arrived."""
        self.results = ResultQueue()
        self.on_arrival: Callable[[], None] = lambda: None
        """Called after a plan was queued."""

    def submit(self, plan: StepPlan) -> Literal["first", "next", "repeated"] | PlanGap:
        """Has `plan` executed after those before it, where it is the next one: (epoch, step) are consecutive. `first`:
        a new epoch, which begins with step 0, and everything before it is void. After a gap only that can follow.

        Raises queue.Full."""
        first = plan.epoch != self.epoch
        expected = 0 if first else self.expected
        if plan.step != expected:
            return "repeated" if plan.step < expected else PlanGap(expected)
        # A queue.Queue counts for itself, at ten times the price; there is nobody else who puts anything in.
        if self._plans.qsize() >= MAX_QUEUED_PLANS:
            raise queue.Full
        self.epoch, self.expected = plan.epoch, expected + 1
        self._plans.put(QueuedPlan(plan, first, time.perf_counter()))
        self.on_arrival()
        return "first" if first else "next"

    def end(self) -> None:
        """No plan comes behind those that wait. Raises queue.Full."""
        if self._plans.qsize() >= MAX_QUEUED_PLANS:
            raise queue.Full
        self._plans.put(None)
        self.on_arrival()

    @property
    def has_next(self) -> bool:
        """Whether `next_plan` returns at once; on the thread that calls it."""
        return not self._plans.empty()

    def next_plan(self) -> QueuedPlan | None:
        """The next one, when it has come. None: there will be no more."""
        queued = self._plans.get()
        if queued is None or not self._skip_void or queued.plan.epoch == self.epoch:
            return queued
        return queued._replace(void=True)


_MAX_NOTICES = 4096
"""Bytes that are read at a time: one call answers any number of notices."""

_write = ctypes.PyDLL(None).write  # of the C library; a PyDLL keeps the lock while it calls
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


class ResultQueue:
    """Brings results from other threads to the event loop, in the order of the calls, without holding a thread up.

    Whatever may wait releases Python's global lock, and `call_soon_threadsafe` does, where it writes: the event loop
    wakes up, takes the lock, and is at work for some tenths of a millisecond while the device has nothing to do. Here
    the lock is kept while the byte is written, and released by the thread when it computes.

    Owns a pipe. Made on the event loop, where `get` is called.
    """

    def __init__(self) -> None:
        self._put: deque[Result] = deque()
        """At most as many results as plans were queued."""
        self._arrived: asyncio.Queue[Result] = asyncio.Queue()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._take)

    def put(self, result: Result) -> None:
        """From any thread. A full pipe holds notices enough."""
        self._put.append(result)
        _write(self._writer, b"!", 1)

    def _take(self) -> None:
        os.read(self._reader, _MAX_NOTICES)
        while self._put:
            self._arrived.put_nowait(self._put.popleft())

    async def get(self) -> ComputedPlan:
        """The next plan's output, in the order of the plans. Raises what computing raised."""
        result = await self._arrived.get()
        if isinstance(result, UnreadResult):
            output = result.read()
            timing = output.timing
            timed = replace(timing, wait=result.wait + timing.wait, prepare=result.exposed + timing.prepare)
            return ComputedPlan(result.plan, replace(output, timing=timed), result.ended)
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """Closes the pipe; no further `put` may follow."""
        self._loop.remove_reader(self._reader)
        os.close(self._reader)
        os.close(self._writer)
