"""A step that the device has been given, and what it will have drawn: on its way to the host until somebody waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from services.worker.backend import StepOutput
from services.worker.batch import Batch
from services.worker.drawn_step import DrawnBatch, DrawnStep
from services.worker.sampling.prompt_rows import ScoredRows
from services.worker.sampling.sampler import Drawn
from services.worker.speculation.trial import Trial
from services.worker.speculation.verdict import Verdict
from services.worker.step_clock import Mark
from shared.messages.scheduler import StepTiming
from shared.messages.worker import StepPlan


class Marks(NamedTuple):
    """Places in the device's work on a step."""

    begun: Mark
    forwarded: Mark
    over: Mark
    """Behind the copies of what it drew."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """See `StepUnderWay`. Nothing that it holds is written to any more, but by the device, before `marks.over`."""

    plan: StepPlan
    batch: Batch
    drawn: Drawn
    """On its way to the host; its tokens are what `Verdict.of` reads."""
    scored: ScoredRows
    """On its way to the host."""
    tenancies: NDArray[np.int64]
    """[Q] whose slots they were; see `SequenceTable.tenancies`."""
    marks: Marks
    trial: Trial | None
    """None where nobody has drafts: it is known then how long its sequences are behind it."""

    def verdict(self) -> Verdict:
        """Once the device is done, which this waits for."""
        self.marks.over.wait()
        return Verdict.of(self.drawn.tokens.numpy().astype(np.int32), self.batch.drafted, self.drawn.told)

    def output(self) -> StepOutput:
        verdict, marks = self.verdict(), self.marks
        timing = StepTiming(
            wait=0.0,
            prepare=0.0,  # the caller knows how much of it held the device up
            forward=marks.forwarded.seconds_since(marks.begun),
            sample=marks.over.seconds_since(marks.forwarded),
        )
        output = DrawnStep(self.plan, timing, DrawnBatch(self.batch, verdict, self.scored)).output()
        return replace(output, ended=marks.over.when(), began=marks.begun.when())
