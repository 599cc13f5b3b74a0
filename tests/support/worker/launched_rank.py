"""A rank driven by launches instead of steps, and a driver that is steps ahead of what it knows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from services.worker.backend import Backend, Step
from services.worker.executor.device_runner import DeviceRunner
from services.worker.executor.host_runner import HostRunner
from shared.ids import SequenceId
from shared.messages.worker import StepPlan
from tests.support.worker.plan_driver import Driver, Sequence

Runner = HostRunner | DeviceRunner

UNKNOWN = 2
"""Placeholder in plans for a token that is being sampled."""


def launching(backend: HostRunner) -> DeviceRunner:
    """The same rank: weights and KV memory are the dear part of a backend. Use one of the two, then `reset` it."""
    return DeviceRunner(backend.rank)


@runtime_checkable
class BeginsSteps(Protocol):
    """A runner of a test that has its own way of beginning steps."""

    def begin(self, plan: StepPlan) -> Step: ...


def begin_step(backend: Backend, plan: StepPlan) -> Step:
    """Prepared and launched on this thread."""
    with backend.compute_context():
        step = backend.prepare(plan)
        step.launch()
    return step


@dataclass
class _Begun:
    step: Step
    plan: StepPlan
    places: dict[SequenceId, tuple[Sequence, int]]
    """Where in each sequence's tokens what it draws belongs, as far as that is known."""


class DriverAhead(Driver):
    """Begins `ahead` more steps before it takes what the first of them drew. All drafts are taken to stand until it is
    known which do, as by a scheduler."""

    def __init__(
        self, backend: DeviceRunner, *, ahead: int = 2, budget: int = 512, epoch: int = 1, speculate: int = 0
    ) -> None:
        super().__init__(backend, budget=budget, epoch=epoch, speculate=speculate)
        self._begin = backend.begin if isinstance(backend, BeginsSteps) else partial(begin_step, backend)
        self._ahead = ahead
        self._begun: deque[_Begun] = deque()

    def _take(self, plan: StepPlan) -> None:
        places = {}
        for work in plan.work:
            if work.sample:
                sequence = self.sequences[work.sequence]
                places[work.sequence] = (sequence, len(sequence.tokens))
                if sequence.pooling is not None:
                    continue
                sequence.tokens += [UNKNOWN] * (1 + work.speculate)
                sequence.computed = len(sequence.tokens) - 1
        self._begun.append(_Begun(self._begin(plan), plan, places))
        while len(self._begun) > self._ahead:
            self._take_oldest()

    def begin_next(self) -> Step:
        """The step that the next plan begins."""
        self.step()
        return self._begun[-1].step

    def finish(self) -> None:
        """Takes what all steps drew."""
        while self._begun:
            self._take_oldest()

    def preempt(self, sequence: Sequence) -> None:
        """A scheduler knows the tokens of whom it preempts."""
        self.finish()
        super().preempt(sequence)

    def run(self) -> None:
        while not all(sequence.done for sequence in self.sequences.values()):
            self.step()
            if all(sequence.done for sequence in self.sequences.values()):
                self.finish()  # drafts that do not stand are still to be drawn otherwise
        for sequence in self.sequences.values():
            del sequence.tokens[sequence.prompt_length + sequence.wanted :]
            del sequence.logprobs[sequence.wanted :]
        self.release_done()
        self.finish()

    def _take_oldest(self) -> None:
        begun = self._begun.popleft()
        output = begun.step.result()
        work = [work for work in begun.plan.work if work.sample]
        for sampled, one in zip(output.sampled, work, strict=True):
            assert sampled.sequence == one.sequence
            sequence, place = begun.places[sampled.sequence]
            if sequence.pooling is not None:
                assert sampled.tokens == ()
                continue
            sequence.tokens[place : place + 1 + one.speculate] = sampled.tokens
            sequence.logprobs += sampled.logprobs or ()
            self._move_back(sequence, 1 + one.speculate - len(sampled.tokens))
        self.scored += output.scored
        self.record_pooled(output.pooled)
        self.drafted += output.drafted
        self.accepted += sum(output.accepted)

    def _move_back(self, sequence: Sequence, missing: int) -> None:
        sequence.computed = len(sequence.tokens) - 1 if missing else sequence.computed
        for later in self._begun:
            for each, (whose, place) in later.places.items():
                if whose is sequence:
                    later.places[each] = whose, place - missing
