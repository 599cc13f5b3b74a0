"""A step that the device has been given, and what it will have drawn: on its way to the host until somebody waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from services.worker.backend import StepOutput
from services.worker.batch import Batch
from services.worker.drawn_step import DrawnBatch, DrawnStep
from services.worker.ops import BatchMeta
from services.worker.rows import Int32s
from services.worker.sampling.prompt_rows import ScoredRows
from services.worker.sampling.sampler import Drawn
from services.worker.speculation.standing import standing
from services.worker.speculation.verdict import Verdict, by_sequence
from services.worker.step_clock import Mark
from shared.messages.scheduler import StepTiming
from shared.messages.worker import StepPlan


class Marks(NamedTuple):
    """Places in the device's work on a step."""

    begun: Mark
    forwarded: Mark
    over: Mark
    """Behind the copies of what it drew."""


class WithDrafts(NamedTuple):
    """Of a step that tries drafts."""

    tokens: Int32s
    """[Q, K]"""
    meta: BatchMeta
    """As the next one, for whoever drafts, when it is known what stands."""
    features: Tensor | None


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """See `StepUnderWay`. Nothing that it holds is written to any more, but by the device, before `marks.over`."""

    plan: StepPlan
    batch: Batch
    drawn: Drawn
    """On its way to the host."""
    scored: ScoredRows
    """On its way to the host."""
    tenancies: NDArray[np.int64]
    """[Q] whose slots they were; see `SequenceTable.tenancies`."""
    places: Int32s
    """[Q] the position of each first token drawn."""
    marks: Marks
    drafts: WithDrafts | None

    def tokens(self) -> Int32s:
        """[Q, K + 1], once the device is done, which this waits for."""
        self.marks.over.wait()
        drawn: Int32s = self.drawn.tokens.numpy().astype(np.int32)
        return by_sequence(drawn, self.batch.drafted)

    def output(self) -> StepOutput:
        tokens, marks, drafted = self.tokens(), self.marks, self.batch.drafted
        counts = np.ones_like(drafted) if self.drafts is None else 1 + standing(tokens, self.drafts.tokens, drafted)
        timing = StepTiming(
            wait=0.0,
            prepare=0.0,  # the caller knows how much of it held the device up
            forward=marks.forwarded.seconds_since(marks.begun),
            sample=marks.over.seconds_since(marks.forwarded),
        )
        verdict = Verdict(tokens, counts, self.drawn.told)
        output = DrawnStep(self.plan, timing, DrawnBatch(self.batch, verdict, self.scored)).output()
        return replace(output, ended=marks.over.when(), began=marks.begun.when())
