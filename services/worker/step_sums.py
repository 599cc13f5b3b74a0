"""Adds up where a rank's time went, for its reports."""

from __future__ import annotations

from msgspec.structs import replace

from services.worker.backend import StepOutput
from services.worker.metrics import PAUSE
from shared.messages.lifecycle import StepSums
from shared.messages.worker import StepPlan


def added(sums: StepSums, plan: StepPlan, output: StepOutput) -> StepSums:
    """`sums` with one more step. A wait longer than PAUSE is a pause of traffic."""
    timing = output.timing
    paused = timing.wait > PAUSE
    return replace(
        sums,
        steps=sums.steps + 1,
        wait=sums.wait + (0.0 if paused else timing.wait),
        prepare=sums.prepare + timing.prepare,
        forward=sums.forward + timing.forward,
        sample=sums.sample + timing.sample,
        answer=sums.answer + timing.answer,
        paused=sums.paused + (timing.wait if paused else 0.0),
        computed=sums.computed + sum(work.count for work in plan.work),
        sampled=sums.sampled + sum(len(each.tokens) for each in output.sampled),
    )
