"""Gives a device that works by itself its next step while it computes one; a second thread waits for what comes out.

So receiving, preparing, computing and answering overlap: plans are received and results published by the event loop,
prepared and launched here, and awaited there.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import NamedTuple

from msgspec.structs import replace

from services.worker.backend import MOST_BEGUN, LaunchingBackend, StepUnderWay
from services.worker.copy_thread import around
from services.worker.step_flow import Computed, Job, StepFlow


class _Begun(NamedTuple):
    """What the device has been given. `step` None: left out."""

    job: Job
    step: StepUnderWay | None
    launched: float


class Launching:
    """Owns the steps that the device has been given."""

    def __init__(self, flow: StepFlow, backend: LaunchingBackend) -> None:
        self._flow = flow
        self._backend = backend
        self._begun: queue.Queue[_Begun | None] = queue.Queue(MOST_BEGUN - 1)
        """Beside the one that is awaited."""
        self._ended = time.perf_counter()
        """When the latest step was computed."""

    def launch_all(self) -> None:
        """Until the plans end."""
        threading.Thread(target=self._await_all, name="answer", daemon=True).start()
        while (job := self._flow.job()) is not None:
            if self._flow.is_void(job):
                self._begun.put(_Begun(job, None, 0.0))
                continue
            if job.first:
                self._begun.join()
                self._flow.begin_epoch(self._backend)
            step = self._backend.begin(job.plan)
            self._begun.put(_Begun(job, step, time.perf_counter()))
        self._begun.join()
        self._begun.put(None)

    # ---- on the answering thread

    def _await_all(self) -> None:
        try:
            while (begun := self._begun.get()) is not None:
                self._await(begun)
                self._begun.task_done()
        except BaseException as error:
            self._flow.hand_over(error)

    def _await(self, begun: _Begun) -> None:
        """What the plan wants copied begins when all steps before it are computed, or itself is."""
        job, step, launched = begun
        if step is None:
            self._flow.leave_out(job)
            return
        before, after = around(job.plan.transfers)
        self._flow.copy(job.plan, before)
        output = step.output()
        self._flow.copy(job.plan, after)
        began = launched if output.began is None else output.began
        exposed = max(0.0, began - max(job.arrived, self._ended))
        wait = max(0.0, job.arrived - self._ended)
        self._ended = time.perf_counter() if output.ended is None else output.ended
        timed = replace(output, timing=replace(output.timing, wait=wait, prepare=exposed))
        self._flow.hand_over(Computed(job.plan, timed, self._ended))
