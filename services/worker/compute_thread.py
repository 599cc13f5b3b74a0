"""The one thread that touches the device: plans in, outputs out, nothing else. Knows no bus.

A device that works by itself (`LaunchingBackend`) is given the next step while it computes one; a second thread waits
for what comes out. So receiving, preparing, computing and answering overlap: plans are received and results published
by the event loop, prepared and launched here, and awaited there.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from services.worker.backend import MOST_BEGUN, Backend, DeferringBackend, LaunchingBackend, StepOutput, StepUnderWay
from services.worker.copy_thread import CopyThread, around
from shared.ids import Incarnation
from shared.messages.worker import StepPlan, Transfer

PLANS_LIMIT = 64
"""Plans that may lie ready; a scheduler runs 3 ahead at the most, and one more for each further stage of a pipeline: a
full queue is a bug and raises."""

STOP_SECONDS = 2.0


class _Job(NamedTuple):
    plan: StepPlan
    first: bool
    arrived: float


class _Begun(NamedTuple):
    """What the device has been given. `step` None: left out."""

    job: _Job
    step: StepUnderWay | None
    launched: float


class Computed(NamedTuple):
    plan: StepPlan
    output: StepOutput | None
    """None: left out, its epoch was over."""
    ended: float = 0.0
    """When it was computed, on `time.perf_counter`'s clock."""


class _Told(NamedTuple):
    """A step that is computed, to be put into words on the event loop."""

    plan: StepPlan
    step: StepUnderWay
    wait: float
    ended: float

    def computed(self) -> Computed:
        output = self.step.output()
        timing = replace(output.timing, wait=self.wait + output.timing.wait)
        return Computed(self.plan, replace(output, timing=timing), self.ended)


class _Known(NamedTuple):
    """One that was put into words where it was computed."""

    known: StepOutput

    def output(self) -> StepOutput:
        return self.known


class ComputeThread:
    """Owns the thread and, on it, the backend: libraries keep state per thread, so it is made there too.

    The threads are daemons: a device that hangs must not keep the process from ending.
    """

    def __init__(self, make_backend: Callable[[], Backend], copies: CopyThread, *, skip_void: bool) -> None:
        self._make_backend = make_backend
        self._copies = copies
        self._skip_void = skip_void
        """Leave out plans of an epoch that is over. Ranks that compute together may not: each must execute exactly
        what the others do."""
        self._jobs: queue.Queue[_Job | None] = queue.Queue(PLANS_LIMIT)
        self._begun: queue.Queue[_Begun | None] = queue.Queue(MOST_BEGUN - 1)
        """Beside the one that is awaited."""
        self._epoch: Incarnation | None = None
        self._ended = time.perf_counter()
        """When the latest step was computed."""
        self._results: asyncio.Queue[Computed | _Told | BaseException] = asyncio.Queue()
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
        return result.computed() if isinstance(result, _Told) else result

    async def stop(self) -> None:
        """Ends the thread after the step in hand, or leaves it behind when that does not end."""
        try:
            self._jobs.put_nowait(None)
        except queue.Full:
            return
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)

    # ---- on the compute thread

    def _run(self) -> None:
        try:
            backend = self._make_backend()
            self._copies.start(backend.kv)
        except BaseException as error:
            self._loop.call_soon_threadsafe(_fail, self._ready, error)
            return
        self._loop.call_soon_threadsafe(_resolve, self._ready, backend)
        try:
            if isinstance(backend, LaunchingBackend):
                self._launch_all(backend)
            else:
                self._compute_all(backend)
        except BaseException as error:
            self._hand_over(error)

    def _compute_all(self, backend: Backend) -> None:
        """Step by step: nothing can be prepared while the processor computes."""
        compute = backend.compute if isinstance(backend, DeferringBackend) else lambda plan: _Known(backend.step(plan))
        self._ended = time.perf_counter()
        while (job := self._jobs.get()) is not None:
            if self._is_void(job):
                self._hand_over(Computed(job.plan, None))
                continue
            if job.first:
                self._begin_epoch(backend)
            before, after = around(job.plan.transfers)
            self._copy(job.plan.epoch, before)
            self._copies.step(computing=True)
            step = compute(job.plan)
            self._copies.step(computing=False)
            wait = max(0.0, job.arrived - self._ended)
            self._ended = time.perf_counter()
            self._copy(job.plan.epoch, after)
            self._hand_over(_Told(job.plan, step, wait, self._ended))

    def _launch_all(self, backend: LaunchingBackend) -> None:
        """Gives the device its next step while it computes one; the other thread waits for what comes out."""
        self._ended = time.perf_counter()
        threading.Thread(target=self._await_all, name="answer", daemon=True).start()
        while (job := self._jobs.get()) is not None:
            if self._is_void(job):
                self._begun.put(_Begun(job, None, 0.0))
                continue
            if job.first:
                self._begun.join()
                self._begin_epoch(backend)
            step = backend.begin(job.plan)
            self._begun.put(_Begun(job, step, time.perf_counter()))
        self._begun.join()
        self._begun.put(None)

    def _begin_epoch(self, backend: Backend) -> None:
        self._copies.begin()
        backend.reset()

    def _is_void(self, job: _Job) -> bool:
        return self._skip_void and job.plan.epoch != self._epoch

    # ---- on the answering thread

    def _await_all(self) -> None:
        try:
            while (begun := self._begun.get()) is not None:
                self._await(begun)
                self._begun.task_done()
        except BaseException as error:
            self._hand_over(error)

    def _await(self, begun: _Begun) -> None:
        """What the plan wants copied begins when all steps before it are computed, or itself is."""
        job, step, launched = begun
        if step is None:
            self._hand_over(Computed(job.plan, None))
            return
        before, after = around(job.plan.transfers)
        self._copy(job.plan.epoch, before)
        output = step.output()
        self._copy(job.plan.epoch, after)
        exposed = max(0.0, launched - max(job.arrived, self._ended))
        wait = max(0.0, job.arrived - self._ended)
        self._ended = time.perf_counter() if output.ended is None else output.ended
        timed = replace(output, timing=replace(output.timing, wait=wait, prepare=exposed))
        self._hand_over(Computed(job.plan, timed, self._ended))

    # ---- on either

    def _copy(self, epoch: Incarnation, transfers: tuple[Transfer, ...]) -> None:
        """Unless the epoch is over: nobody awaits them then."""
        if transfers and epoch == self._epoch:
            self._copies.add(epoch, transfers)

    def _hand_over(self, result: Computed | _Told | BaseException) -> None:
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
