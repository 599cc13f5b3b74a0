"""A double of a backend that computes a whole step at once."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from services.worker.backend import ExecutionMode, StepOutput
from shared.kv_groups import KvCacheGroup, StateRecords
from shared.messages.worker import StepPlan


class StepByStep:
    """Says in `step` what a plan comes to, and has nothing to prepare."""

    mode: ExecutionMode = "sequential"
    kv_groups: tuple[KvCacheGroup, ...] = ()
    state_records: StateRecords | None = None

    def step(self, plan: StepPlan) -> StepOutput:
        raise NotImplementedError

    def compute_context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def prepare(self, plan: StepPlan) -> WholeStep:
        return WholeStep(self, plan)


class WholeStep:
    """See :class:`services.worker.backend.Step`."""

    def __init__(self, backend: StepByStep, plan: StepPlan) -> None:
        self._backend, self._plan = backend, plan

    def launch(self) -> None:
        self._output = self._backend.step(self._plan)

    def result(self) -> StepOutput:
        return self._output
