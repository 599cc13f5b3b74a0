"""Whole steps of a rank, from a scheduler's plan to the tokens drawn: bookkeeping, forward pass and sampling."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise
from random import Random

import numpy as np

from services.worker.backend import DeferringBackend, LaunchingBackend, StepUnderWay
from services.worker.roofline.findings import StepCase, Timed
from services.worker.runner_parts import Runner
from shared.blocks import blocks_for
from shared.ids import Incarnation, SequenceId
from shared.messages.generation import SamplingParams
from shared.messages.worker import NewSequence, StepPlan, Work
from shared.tokens import pack

_EPOCH = Incarnation(1)


class WholeSteps:
    """Plays scheduler to `runner`, whose sequences and blocks are its own."""

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        self._random = Random(1)
        self._tokens = np.random.default_rng(1)
        self._step = 0

    def timed(self, case: StepCase, runs: int) -> Timed:
        """By the clock, one step behind the other as a worker computes them: the next is prepared, where the device
        lets it, before the last is told."""
        self._runner.reset()
        taken = self._decodes(case, runs) if case.kind == "decode" else self._prefills(case, runs)
        self._runner.reset()
        return Timed(statistics.median(taken), min(taken), len(taken))

    def _decodes(self, case: StepCase, runs: int) -> list[float]:
        """So many, up to the context that is asked for, behind two that do not count."""
        runs = min(runs, max(1, case.context - 2))
        first = max(1, case.context - runs - 1)
        tables = self._tables(case)
        sequences = [SequenceId(number) for number in range(case.batch)]
        new = tuple(self._new(each, first, first - 1, tables[each]) for each in sequences)
        work = tuple(Work(each, 1, b"", True) for each in sequences)
        return self._told([self._plan(new=new, work=work), *(self._plan(work=work) for _ in range(runs + 1))])

    def _prefills(self, case: StepCase, runs: int) -> list[float]:
        sequences = [SequenceId(number) for number in range(case.batch)]
        plans = []
        for number in range(runs + 2):
            tables = self._tables(case)
            plans.append(
                self._plan(
                    released=tuple(sequences) if number else (),
                    new=tuple(self._new(each, case.context, 0, tables[each]) for each in sequences),
                    work=tuple(Work(each, case.context, b"", True) for each in sequences),
                )
            )
        return self._told(plans)

    def _told(self, plans: list[StepPlan]) -> list[float]:
        """Seconds from one answer to the next, of all plans but the first two. A processor computes a step while it
        begins it, a device by itself: either way an answer comes when one more step is begun."""
        pending, marks = self._begun(plans[0]), []
        for plan in plans[1:]:
            following = self._begun(plan)
            pending.output()
            marks.append(self._clock())
            pending = following
        pending.output()
        return [after - before for before, after in pairwise(marks)]

    def _begun(self, plan: StepPlan) -> StepUnderWay:
        backend = self._runner
        if isinstance(backend, LaunchingBackend):
            return backend.begin(plan)
        assert isinstance(backend, DeferringBackend), "a model runner is"
        return backend.compute(plan)

    def _tables(self, case: StepCase) -> list[bytes]:
        """Packed block ids of each sequence, anywhere."""
        width = blocks_for(case.context)
        ids = self._random.sample(range(self._runner.num_blocks), case.batch * width)
        return [pack(ids[at : at + width]) for at in range(0, len(ids), width)]

    def _new(self, sequence: SequenceId, length: int, computed: int, blocks: bytes) -> NewSequence:
        vocabulary = self._runner.card.vocab_size
        tokens = self._tokens.integers(vocabulary, size=length).astype("<u4").tobytes()
        return NewSequence(
            sequence=sequence,
            tokens=tokens,
            prompt_length=length,
            computed=computed,
            blocks=blocks,
            sampling=SamplingParams(seed=int(sequence)),
        )

    def _plan(
        self,
        *,
        released: tuple[SequenceId, ...] = (),
        new: tuple[NewSequence, ...] = (),
        work: tuple[Work, ...] = (),
    ) -> StepPlan:
        plan = StepPlan(epoch=_EPOCH, step=self._step, released=released, new=new, work=work)
        self._step += 1
        return plan
