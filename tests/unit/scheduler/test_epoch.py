"""When plans are made: as late as the workers allow, or at once."""

from __future__ import annotations

import pytest

from services.scheduler.core.events import (
    Event,
    SendPlan,
    TimePassed,
)
from services.scheduler.core.limits import EngineLimits
from shared.messages.worker import StepPlan
from tests.support.engines.checking_worker import HonestWorker, generate
from tests.support.engines.single_engine import started


def test_the_plan_ahead_waits_and_takes_in_who_came_meanwhile() -> None:
    engine = started(EngineLimits(max_running=10, max_batch_tokens=64))
    worker = HonestWorker(64)

    def issued(event: Event, now: float) -> list[StepPlan]:
        return [o.plan for o in engine.handle(event, now) if isinstance(o, SendPlan)]

    first, second = issued(generate("a", [4] * 8, ignore_eos=True), 0.0)
    assert issued(worker.step(first), 0.1) != [], "a decode was never timed, so nothing waits"
    assert issued(worker.step(second), 0.2) == []
    assert engine.plan_due == pytest.approx(0.25)
    assert issued(generate("b", [5] * 8, ignore_eos=True), 0.24) == []
    (plan,) = issued(TimePassed(), 0.25)
    assert (len(plan.new), len(plan.work)) == (1, 2)
    assert engine.plan_due is None


def test_plans_can_be_made_at_once() -> None:
    engine = started(EngineLimits(max_running=10, max_batch_tokens=64, plan_late=False))
    worker = HonestWorker(64)
    plans = [o.plan for o in engine.handle(generate("a", [4] * 8, ignore_eos=True), 0.0) if isinstance(o, SendPlan)]
    for now in range(1, 9):
        outputs = engine.handle(worker.step(plans.pop(0)), float(now))
        plans += [o.plan for o in outputs if isinstance(o, SendPlan)]
        assert len(plans) == 2
