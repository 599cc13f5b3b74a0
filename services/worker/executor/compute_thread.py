"""The thread that takes plans through a backend: each is prepared, launched, and its result handed over. Knows no bus.

How steps overlap is the backend's `mode`:

| mode       | prepares        | launches       | waits for results | prepared ahead     |
|------------|-----------------|----------------|-------------------|--------------------|
| sequential | compute thread  | compute thread | compute thread    | nothing            |
| prepared   | a second thread | compute thread | compute thread    | all plans there are|
| launched   | compute thread  | compute thread | a second thread   | MAX_LAUNCHED_STEPS |

So receiving, preparing, computing and answering overlap: plans are received and results published by the event loop.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from services.worker.backend import MAX_LAUNCHED_STEPS, Backend, GroupMember, Step, StepOutput
from services.worker.executor.plan_queue import ComputedPlan, PlanQueue, QueuedPlan, UnreadResult
from services.worker.kv.connector_thread import ConnectorThread
from services.worker.kv.copy_thread import CopyThread, around
from shared.messages.worker import Transfer

STOP_TIMEOUT = 2.0
"""Seconds that a step under way is waited for when the thread is to end."""


class _PreparedPlan(NamedTuple):
    """A plan that is prepared, or launched, at a moment on `time.perf_counter`'s clock. `step` None: left out."""

    queued: QueuedPlan
    step: Step | None
    at: float


class _ExecutedStep(NamedTuple):
    """A step that is computed: how its result is read, and when the device could begin with it, and was done."""

    read: Callable[[], StepOutput]
    began: float
    ended: float


class ComputeThread:
    """Owns the thread and, on it, the backend: libraries keep state per thread, so it is made there too.

    The threads are daemons: a device that hangs must not keep the process from ending.
    """

    def __init__(
        self,
        make_backend: Callable[[], Backend],
        plans: PlanQueue,
        copies: CopyThread,
        connector: ConnectorThread | None = None,
        world_size: int = 1,
    ) -> None:
        self._make_backend = make_backend
        self._plans = plans
        self._copies = copies
        self._connector = connector
        self._world_size = world_size
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._prepared: queue.SimpleQueue[_PreparedPlan | threading.Event | BaseException | None] = queue.SimpleQueue()
        """Steps that are prepared and not computed: no more than the scheduler's plans ahead. An event is set when all
        before it are computed."""
        self._launched: queue.Queue[_PreparedPlan | None] = queue.Queue(MAX_LAUNCHED_STEPS - 1)
        """Steps that were launched, without the one whose result is awaited."""
        self._ended = 0.0
        """When the latest step was over, on `time.perf_counter`'s clock."""

    async def start(self) -> Backend:
        """The backend, ready. Raises what making it raised."""
        self._ready: asyncio.Future[Backend] = self._loop.create_future()
        self._thread.start()
        return await self._ready

    async def stop(self) -> None:
        """Ends the thread after the step in hand, or leaves it behind when that does not end."""
        try:
            self._plans.end()
        except queue.Full:
            return
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT)
        if not self._thread.is_alive():
            self._plans.results.close()

    # ---- on the compute thread

    def _run(self) -> None:
        try:
            self._backend = self._make_backend()
            self._launches = self._backend.mode == "launched"
            self._copies.start(self._backend.kv)
            if self._connector is not None:
                self._connector.start(self._backend.kv, self._world_size)
        except BaseException as error:
            self._loop.call_soon_threadsafe(_fail, self._ready, error)
            return
        self._ended = time.perf_counter()
        self._loop.call_soon_threadsafe(_resolve, self._ready, self._backend)
        execute = {
            "sequential": self._execute_in_sequence,
            "prepared": self._execute_prepared,
            "launched": self._execute_launched,
        }[self._backend.mode]
        try:
            with self._backend.compute_context():
                execute()
        except BaseException as error:
            self._plans.results.put(error)

    def _execute_in_sequence(self) -> None:
        if self._backend.group is not None:
            self._execute_in_group(self._backend.group)
            return
        while (queued := self._plans.next_plan()) is not None:
            self._execute(_PreparedPlan(queued, self._prepare(queued), time.perf_counter()))

    def _execute_in_group(self, group: GroupMember) -> None:
        """Executes plans. Between them, this rank takes part in the steps of the data-parallel group's other
        engines."""
        self._plans.on_arrival = group.notify_plan
        while True:
            group.wait_for_plan(lambda: self._plans.has_next)
            if (queued := self._plans.next_plan()) is None:
                return
            self._execute(_PreparedPlan(queued, self._prepare(queued), time.perf_counter()))

    def _execute_prepared(self) -> None:
        """Computing leaves Python's lock alone for most of its time, so that a second thread can prepare."""
        threading.Thread(target=self._prepare_all, name="prepare", daemon=True).start()
        while (ready := self._prepared.get()) is not None:
            match ready:
                case _PreparedPlan():
                    self._execute(ready)
                case threading.Event():
                    ready.set()
                case _:
                    raise ready

    def _execute_launched(self) -> None:
        threading.Thread(target=self._await_all, name="answer", daemon=True).start()
        while (queued := self._plans.next_plan()) is not None:
            if (step := self._prepare(queued)) is not None:
                step.launch()
            self._launched.put(_PreparedPlan(queued, step, time.perf_counter()))
        self._launched.join()
        self._launched.put(None)

    def _prepare(self, queued: QueuedPlan) -> Step | None:
        """Prepares a plan, and begins its epoch if it is the first of one. None if the plan is left out, as its epoch
        is over."""
        if queued.void:
            return None
        if queued.first:
            self._finish_all()
            self._copies.begin()
            if self._connector is not None:
                self._connector.begin()
            self._backend.reset()
        return self._backend.prepare(queued.plan)

    def _finish_all(self) -> None:
        """Returns when no step is under way."""
        if self._backend.mode == "launched":
            self._launched.join()
        elif self._backend.mode == "prepared":
            self._prepared.put(computed := threading.Event())
            computed.wait()

    def _execute(self, ready: _PreparedPlan) -> None:
        """Computes a step, which a processor does while it is launched, or waits until the device has computed it, and
        hands its result over. Transfers of the plan begin when all steps before it are computed, or itself is."""
        queued, step, at = ready
        if step is None:
            self._plans.results.put(ComputedPlan(queued.plan, None))
            return
        before, after = around(queued.plan.transfers) if queued.plan.transfers else ((), ())
        if before:
            self._copy(queued, before)
        connector = None if queued.plan.connector is None else self._connector
        if connector is not None:
            connector.before_step(queued.plan)
        read, began, ended = self._await_device(step, at) if self._launches else self._compute(step, at)
        if connector is not None:
            connector.after_step()
        if after:
            self._copy(queued, after)
        wait = max(0.0, queued.arrived - self._ended)
        exposed = max(0.0, began - max(queued.arrived, self._ended))
        self._ended = ended
        self._plans.results.put(UnreadResult(queued.plan, read, wait, exposed, ended))

    def _compute(self, step: Step, prepared: float) -> _ExecutedStep:
        self._copies.computing = True
        step.launch()
        self._copies.computing = False
        self._copies.active = ended = time.perf_counter()
        return _ExecutedStep(step.result, prepared, ended)

    def _await_device(self, step: Step, launched: float) -> _ExecutedStep:
        output = step.result()
        began = launched if output.began is None else output.began
        return _ExecutedStep(lambda: output, began, time.perf_counter() if output.ended is None else output.ended)

    def _copy(self, queued: QueuedPlan, transfers: tuple[Transfer, ...]) -> None:
        """Starts a plan's transfers. Ignored if the epoch is over: nobody awaits them."""
        if queued.plan.epoch == self._plans.epoch:
            self._copies.add(queued.plan.epoch, transfers)

    # ---- on the second thread of the mode `prepared`

    def _prepare_all(self) -> None:
        try:
            while (queued := self._plans.next_plan()) is not None:
                self._prepared.put(_PreparedPlan(queued, self._prepare(queued), time.perf_counter()))
            self._prepared.put(None)
        except BaseException as error:  # raised again on the compute thread
            self._prepared.put(error)

    # ---- on the second thread of the mode `launched`

    def _await_all(self) -> None:
        try:
            while (launched := self._launched.get()) is not None:
                self._execute(launched)
                self._launched.task_done()
        except BaseException as error:
            self._plans.results.put(error)


def _resolve(ready: asyncio.Future[Backend], backend: Backend) -> None:
    if not ready.done():
        ready.set_result(backend)


def _fail(ready: asyncio.Future[Backend], error: BaseException) -> None:
    if not ready.done():
        ready.set_exception(error)
