"""Prepares the next step on a second thread while the processor computes one.

Computing leaves Python's lock alone for most of its time, so that receiving, preparing and answering have it.
"""

from __future__ import annotations

import queue
import threading
import time
from functools import partial
from typing import NamedTuple

from services.worker.backend import PreparedStep, PreparingBackend
from services.worker.in_turn import InTurn
from services.worker.step_flow import Job, StepFlow


class _Ready(NamedTuple):
    """`step` None: left out."""

    job: Job
    step: PreparedStep | None
    at: float


class Preparing:
    """Owns the steps that are prepared and not computed; they are no more than the scheduler's plans ahead."""

    def __init__(self, flow: StepFlow, backend: PreparingBackend) -> None:
        self._flow = flow
        self._backend = backend
        self._ready: queue.SimpleQueue[_Ready | BaseException | None] = queue.SimpleQueue()

    def compute_all(self) -> None:
        """Until the plans end. Raises what preparing or computing raised."""
        turns = InTurn(self._flow)
        threading.Thread(target=self._prepare_all, name="prepare", daemon=True).start()
        with self._backend.computing():
            while (ready := self._ready.get()) is not None:
                if isinstance(ready, BaseException):
                    raise ready
                self._compute(turns, ready)

    def _compute(self, turns: InTurn, ready: _Ready) -> None:
        job, step, at = ready
        if step is None:
            self._flow.leave_out(job)
        else:
            turns.compute(job, at, partial(_computed, step))

    # ---- on the thread that prepares

    def _prepare_all(self) -> None:
        try:
            while (job := self._flow.job()) is not None:
                self._ready.put(self._prepared(job))
            self._ready.put(None)
        except BaseException as error:  # raised again on the other thread
            self._ready.put(error)

    def _prepared(self, job: Job) -> _Ready:
        if self._flow.is_void(job):
            return _Ready(job, None, 0.0)
        if job.first:
            self._backend.settle()
            self._flow.begin_epoch(self._backend)
        step = self._backend.prepare(job.plan)
        return _Ready(job, step, time.perf_counter())


def _computed(step: PreparedStep) -> PreparedStep:
    step.compute()
    return step
