"""What one step may hold."""

from __future__ import annotations

from services.scheduler.core.events import (
    SendPlan,
)
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.planning.step_builder import new_sequence
from tests.support.engines.checking_worker import generate
from tests.support.engines.single_engine import started


def test_workers_that_hold_less_bound_the_engine() -> None:
    engine = started(EngineLimits(max_running=10, max_batch_tokens=64))
    report = engine.report()
    assert report is not None
    assert report.max_running == 3
    (plan, *_) = engine.handle(generate("a", [4] * 60), 0.0)
    assert isinstance(plan, SendPlan)
    assert plan.plan.work[0].count == 40


def test_one_plan_carries_only_so_many_bytes_of_new_prompts() -> None:
    engine = started(EngineLimits(max_running=10, max_batch_tokens=64, max_new_bytes=100, run_ahead=0))
    engine.handle(generate("first", [4] * 4, max_tokens=5), 0.0)
    engine.handle(generate("a", [4] * 30, max_tokens=1), 0.0)
    engine.handle(generate("b", [5] * 4, max_tokens=1), 0.0)
    assert engine.epoch_state is not None
    planner = engine.epoch_state.planner
    step = planner.plan(0.0)
    assert step is not None
    new = [new_sequence(*started) for started in step.started]
    assert [len(n.tokens) for n in new] == [120], "a single one always may, a second one may not"
