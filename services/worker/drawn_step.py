"""A step that is computed, and put into words when somebody asks: on another thread than the one that computes."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.backend import StepOutput
from services.worker.batch import Batch
from services.worker.sampling.prompt_rows import ScoredRows
from services.worker.speculation.verdict import Verdict
from shared.messages.scheduler import Sampled, StepTiming
from shared.messages.worker import StepPlan


@dataclass(frozen=True, slots=True)
class DrawnBatch:
    """What a batch drew, and said of prompts."""

    batch: Batch
    verdict: Verdict | None
    """None on ranks that draw nothing."""
    scored: ScoredRows


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """See `StepUnderWay`. Nothing that it holds is written to any more."""

    plan: StepPlan
    timing: StepTiming
    drawn: DrawnBatch | None = None
    """None where there was nothing to compute."""

    def output(self) -> StepOutput:
        if self.drawn is None:
            return StepOutput(_complete(self.plan, ()), self.timing)
        batch, verdict, scored = self.drawn.batch, self.drawn.verdict, self.drawn.scored.told()
        if verdict is None:
            return StepOutput((), self.timing, int(batch.drafted.sum()), (), scored)
        sampled = _complete(self.plan, verdict.sampled(batch))
        return StepOutput(sampled, self.timing, int(batch.drafted.sum()), verdict.by_position(batch), scored)


def _complete(plan: StepPlan, sampled: tuple[Sampled, ...]) -> tuple[Sampled, ...]:
    """An entry for each work that wanted one: those whose context was full drew nothing."""
    if len(sampled) == sum(work.sample for work in plan.work):
        return sampled
    by_sequence = {one.sequence: one for one in sampled}
    return tuple(by_sequence.get(work.sequence) or Sampled(work.sequence, ()) for work in plan.work if work.sample)
