"""Plans in, computed steps out, in order: what all ways of computing have in common. Knows no bus and no device."""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from typing import NamedTuple

from msgspec.structs import replace

from services.worker.backend import Backend, StepOutput, StepUnderWay
from services.worker.copy_thread import CopyThread
from services.worker.doorbell import Doorbell
from shared.ids import Incarnation
from shared.messages.worker import StepPlan, Transfer

PLANS_LIMIT = 64
"""Plans that may lie ready; a scheduler runs 3 ahead at the most, and one more for each further stage of a pipeline: a
full queue is a bug and raises."""


class Job(NamedTuple):
    plan: StepPlan
    first: bool
    arrived: float


class Computed(NamedTuple):
    plan: StepPlan
    output: StepOutput | None
    """None: left out, its epoch was over."""
    ended: float = 0.0
    """When it was computed, on `time.perf_counter`'s clock."""


class Told(NamedTuple):
    """A step that is computed, to be put into words on the event loop."""

    plan: StepPlan
    step: StepUnderWay
    wait: float
    exposed: float
    """What preparing it has held up, beside what it says itself."""
    ended: float

    def computed(self) -> Computed:
        output = self.step.output()
        timing = output.timing
        timed = replace(timing, wait=self.wait + timing.wait, prepare=self.exposed + timing.prepare)
        return Computed(self.plan, replace(output, timing=timed), self.ended)


class StepFlow:
    """Owns the plans that lie ready, and what came of those before. Made on the event loop; `submit` and `result` are
    called there, everything else on the threads that compute."""

    def __init__(self, copies: CopyThread, *, skip_void: bool) -> None:
        self.copies = copies
        self._skip_void = skip_void
        """Leave out plans of an epoch that is over. Ranks that compute together may not: each must execute exactly
        what the others do."""
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._epoch: Incarnation | None = None
        self._handed_over: deque[Computed | Told | BaseException] = deque()
        """No more than the plans that lay ready."""
        self._results: asyncio.Queue[Computed | Told | BaseException] = asyncio.Queue()
        self._bell = Doorbell(self._take_results)

    def submit(self, plan: StepPlan, *, first: bool) -> None:
        """Raises queue.Full."""
        self._epoch = plan.epoch
        self._put(Job(plan, first, time.perf_counter()))

    def end(self) -> None:
        """No job comes behind those that lie ready. Raises queue.Full."""
        self._put(None)

    def _put(self, job: Job | None) -> None:
        # A queue.Queue counts for itself, at ten times the price; there is nobody else who puts anything in.
        if self._jobs.qsize() >= PLANS_LIMIT:
            raise queue.Full
        self._jobs.put(job)

    def close(self) -> None:
        """All that computed has ended."""
        self._bell.close()

    async def result(self) -> Computed:
        """Raises what computing raised."""
        result = await self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result.computed() if isinstance(result, Told) else result

    def job(self) -> Job | None:
        """The next one, when it has come. None: there will be no more."""
        return self._jobs.get()

    def is_void(self, job: Job) -> bool:
        return self._skip_void and job.plan.epoch != self._epoch

    def begin_epoch(self, backend: Backend) -> None:
        """No step is under way."""
        self.copies.begin()
        backend.reset()

    def copy(self, plan: StepPlan, transfers: tuple[Transfer, ...]) -> None:
        """Unless the epoch is over: nobody awaits them then."""
        if transfers and plan.epoch == self._epoch:
            self.copies.add(plan.epoch, transfers)

    def leave_out(self, job: Job) -> None:
        """Its epoch is over."""
        self.hand_over(Computed(job.plan, None))

    def hand_over(self, result: Computed | Told | BaseException) -> None:
        self._handed_over.append(result)
        self._bell.ring()

    def _take_results(self) -> None:
        while self._handed_over:
            self._results.put_nowait(self._handed_over.popleft())
