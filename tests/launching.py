"""A rank driven by launches instead of steps, and a driver that is steps ahead of what it knows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from services.worker.backend import StepUnderWay
from services.worker.launching_runner import LaunchingRunner
from services.worker.model_runner import ModelRunner
from shared.ids import SequenceId
from shared.messages.worker import StepPlan
from tests.worker_driver import Driver, Sequence

Runner = ModelRunner | LaunchingRunner

UNKNOWN = 2
"""Stands for a token that is being drawn, wherever it is planned with."""


def launching(backend: ModelRunner) -> LaunchingRunner:
    """The same rank: weights and KV memory are the dear part of a backend. Use one of the two, then `reset` it."""
    return LaunchingRunner(backend.rank)


@dataclass
class _Begun:
    step: StepUnderWay
    plan: StepPlan
    places: dict[SequenceId, tuple[Sequence, int]]
    """Where in each sequence's tokens what it draws belongs; of those that were not preempted since."""


class DriverAhead(Driver):
    """Begins `ahead` more steps before it takes what the first of them drew. Drafts nothing: it would have to know how
    many stand."""

    def __init__(self, backend: LaunchingRunner, *, ahead: int = 2, budget: int = 512, epoch: int = 1) -> None:
        super().__init__(backend, budget=budget, epoch=epoch)
        self._runner = backend
        self._ahead = ahead
        self._begun: deque[_Begun] = deque()

    def _take(self, plan: StepPlan) -> None:
        places = {}
        for work in plan.work:
            if work.sample:
                sequence = self.sequences[work.sequence]
                places[work.sequence] = (sequence, len(sequence.tokens))
                sequence.tokens.append(UNKNOWN)
        self._begun.append(_Begun(self._runner.begin(plan), plan, places))
        while len(self._begun) > self._ahead:
            self._take_oldest()

    def begin_next(self) -> StepUnderWay:
        """The step that the next plan begins."""
        self.step()
        return self._begun[-1].step

    def settle(self) -> None:
        """Takes what all steps drew."""
        while self._begun:
            self._take_oldest()

    def preempt(self, sequence: Sequence) -> None:
        """A scheduler knows the tokens of whom it preempts."""
        self.settle()
        super().preempt(sequence)

    def run(self) -> None:
        super().run()
        self.settle()

    def _take_oldest(self) -> None:
        begun = self._begun.popleft()
        output = begun.step.output()
        assert [s.sequence for s in output.sampled] == [w.sequence for w in begun.plan.work if w.sample]
        for sampled in output.sampled:
            sequence, place = begun.places[sampled.sequence]
            (sequence.tokens[place],) = sampled.tokens
            sequence.logprobs += sampled.logprobs or ()
        self.scored += output.scored
