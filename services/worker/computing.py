"""Computes step by step: each is prepared when the one before is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from services.worker.backend import Backend, DeferringBackend, StepOutput, StepUnderWay
from services.worker.copy_thread import around
from services.worker.step_flow import Computed, StepFlow, Told
from shared.messages.worker import StepPlan


class _Known(NamedTuple):
    """A step that was put into words where it was computed."""

    known: StepOutput

    def output(self) -> StepOutput:
        return self.known


def compute_all(flow: StepFlow, backend: Backend) -> None:
    """Until the plans end."""
    compute = _way(backend)
    ended = time.perf_counter()
    while (job := flow.job()) is not None:
        if flow.is_void(job):
            flow.hand_over(Computed(job.plan, None))
            continue
        if job.first:
            flow.begin_epoch(backend)
        before, after = around(job.plan.transfers)
        flow.copy(job.plan, before)
        flow.copies.step(computing=True)
        step = compute(job.plan)
        flow.copies.step(computing=False)
        wait = max(0.0, job.arrived - ended)
        ended = time.perf_counter()
        flow.copy(job.plan, after)
        flow.hand_over(Told(job.plan, step, wait, 0.0, ended))


def _way(backend: Backend) -> Callable[[StepPlan], StepUnderWay]:
    return backend.compute if isinstance(backend, DeferringBackend) else lambda plan: _Known(backend.step(plan))
