"""Computes step by step: each is prepared when the one before is over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from services.worker.backend import Backend, DeferringBackend, StepOutput, StepUnderWay
from services.worker.in_turn import InTurn
from services.worker.step_flow import StepFlow
from shared.messages.worker import StepPlan


class _Known(NamedTuple):
    """A step that was put into words where it was computed."""

    known: StepOutput

    def output(self) -> StepOutput:
        return self.known


def compute_all(flow: StepFlow, backend: Backend) -> None:
    """Until the plans end."""
    compute, turns = _way(backend), InTurn(flow)
    while (job := flow.job()) is not None:
        if flow.is_void(job):
            flow.leave_out(job)
            continue
        if job.first:
            flow.begin_epoch(backend)
        turns.compute(job, job.arrived, partial(compute, job.plan))


def _way(backend: Backend) -> Callable[[StepPlan], StepUnderWay]:
    return backend.compute if isinstance(backend, DeferringBackend) else lambda plan: _Known(backend.step(plan))
