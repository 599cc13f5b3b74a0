"""The one thread that touches the device: plans in, outputs out, nothing else. Knows no bus."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from services.worker.backend import Backend, StepOutput
from services.worker.copy_thread import CopyThread, around
from shared.ids import Incarnation
from shared.messages.worker import StepPlan, Transfer

PLANS_LIMIT = 16
"""Plans that may lie ready; a scheduler runs 3 ahead at the most, so a full queue is a bug and raises."""

STOP_SECONDS = 2.0


class _Job(NamedTuple):
    plan: StepPlan
    first: bool
    arrived: float


class Computed(NamedTuple):
    plan: StepPlan
    output: StepOutput | None
    """None: left out, its epoch was over."""


class ComputeThread:
    """Owns the thread and, on it, the backend: libraries keep state per thread, so it is made there too.

    The thread is a daemon: a device that hangs must not keep the process from ending.
    """

    def __init__(self, make_backend: Callable[[], Backend], copies: CopyThread, *, skip_void: bool) -> None:
        self._make_backend = make_backend
        self._copies = copies
        self._skip_void = skip_void
        """Leave out plans of an epoch that is over. Ranks that compute together may not: each must execute exactly
        what the others do."""
        self._jobs: queue.Queue[_Job | None] = queue.Queue(PLANS_LIMIT)
        self._epoch: Incarnation | None = None
        self._results: asyncio.Queue[Computed | BaseException] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    async def start(self) -> Backend:
        """The backend, ready. Raises what making it raised."""
        ready: asyncio.Future[Backend] = self._loop.create_future()
        self._ready = ready
        self._thread.start()
        return await ready

    def submit(self, plan: StepPlan, *, first: bool) -> None:
        """Executes `plan` after those before it; `first` begins a new epoch. Raises queue.Full."""
        self._epoch = plan.epoch
        self._jobs.put_nowait(_Job(plan, first, time.perf_counter()))

    async def result(self) -> Computed:
        """The next step's output, in the order of the plans. Raises what computing raised."""
        result = await self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    async def stop(self) -> None:
        """Ends the thread after the step in hand, or leaves it behind when that does not end."""
        try:
            self._jobs.put_nowait(None)
        except queue.Full:
            return
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)

    def _run(self) -> None:
        try:
            backend = self._make_backend()
            self._copies.start(backend.kv)
        except BaseException as error:
            self._loop.call_soon_threadsafe(_fail, self._ready, error)
            return
        self._loop.call_soon_threadsafe(_resolve, self._ready, backend)
        try:
            self._serve(backend)
        except BaseException as error:
            self._hand_over(error)

    def _serve(self, backend: Backend) -> None:
        idle_since = time.perf_counter()
        while (job := self._jobs.get()) is not None:
            if self._skip_void and job.plan.epoch != self._epoch:
                self._hand_over(Computed(job.plan, None))
                continue
            if job.first:
                self._copies.begin()
                backend.reset()
            output = self._computed(backend, job.plan)
            wait = max(0.0, job.arrived - idle_since)
            idle_since = time.perf_counter()
            self._hand_over(Computed(job.plan, replace(output, timing=replace(output.timing, wait=wait))))

    def _computed(self, backend: Backend, plan: StepPlan) -> StepOutput:
        """Computes the plan; what it wants copied begins before and after."""
        before, after = around(plan.transfers)
        self._copy(plan.epoch, before)
        output = backend.step(plan)
        self._copy(plan.epoch, after)
        return output

    def _copy(self, epoch: Incarnation, transfers: tuple[Transfer, ...]) -> None:
        """Unless the epoch is over: nobody awaits them then."""
        if transfers and epoch == self._epoch:
            self._copies.add(epoch, transfers)

    def _hand_over(self, result: Computed | BaseException) -> None:
        try:
            self._loop.call_soon_threadsafe(self._results.put_nowait, result)
        except RuntimeError:  # the loop is closed: the process is ending
            return


def _resolve(ready: asyncio.Future[Backend], backend: Backend) -> None:
    if not ready.done():
        ready.set_result(backend)


def _fail(ready: asyncio.Future[Backend], error: BaseException) -> None:
    if not ready.done():
        ready.set_exception(error)
