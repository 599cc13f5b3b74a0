"""The small parts of the scheduler's core, and what a scheduler is told at its start."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.scheduler.config import SchedulerConfig
from services.scheduler.core.engine import Engine
from services.scheduler.core.events import (
    Event,
    GatewayGone,
    Output,
    SendPlan,
    SendTokens,
    TimePassed,
    WorkersReady,
)
from services.scheduler.core.fence import Fence
from services.scheduler.core.invariants import BrokenInvariant, check
from services.scheduler.core.limits import Limits
from services.scheduler.core.line import Line
from services.scheduler.core.pace import Pace
from services.scheduler.core.ranks import Ranks, Unequal
from services.scheduler.core.sequence import IllegalStep, Rank, Sequence
from shared.config import ConfigError, load_config
from shared.ids import Attempt, EngineId, Incarnation, InstanceId, RequestId
from shared.messages.lifecycle import Lifecycle, Phase, WorkerReport
from shared.messages.worker import StepPlan
from tests.honest_worker import GATEWAY, HonestWorker, card, generate

ENGINE = EngineId("e")
CARD = card()


def sequence(name: str, ticket: int, priority: int = 0, arrival: float = 0.0) -> Sequence:
    return Sequence(generate(name, [4]), Rank(priority, arrival, ticket), 10, frozenset())


def life(
    rank: int,
    *,
    incarnation: int = 1,
    phase: Phase = "ready",
    blocks: int = 10,
    world_size: int = 2,
    created: int = 0,
    dtype: str = "float32",
    engine: EngineId = ENGINE,
    seqs: int | None = None,
) -> Lifecycle:
    return Lifecycle(
        service="worker",
        instance=InstanceId(f"{engine}-rank{rank}"),
        incarnation=Incarnation(incarnation),
        phase=phase,
        pid=1,
        host="h",
        started=0.0,
        worker=WorkerReport(
            engine=engine,
            rank=rank,
            world_size=world_size,
            model=replace(CARD, created=created, dtype=dtype),
            num_blocks=blocks,
            device="cpu",
            max_num_seqs=seqs,
        ),
    )


def test_a_line_is_served_in_order_of_rank() -> None:
    line = Line()
    late, urgent, early = sequence("late", 1, 0, 9.0), sequence("urgent", 2, -1, 9.0), sequence("early", 3)
    for member in (late, urgent, early):
        line.add(member)
    assert line.members() == [urgent, early, late]
    assert (line.first, line.last) == (urgent, late)
    line.remove(early)
    with pytest.raises(ValueError, match="early is not in this line"):
        line.remove(early)
    assert len(line) == 2


def test_a_fence_bars_attempts_up_to_the_one_that_ended_and_forgets_the_oldest() -> None:
    fence = Fence(remembered=2)
    fence.close(RequestId("a"), Attempt(3))
    fence.close(RequestId("a"), Attempt(1))
    assert [fence.bars(RequestId("a"), Attempt(n)) for n in (1, 3, 4)] == [True, True, False]
    fence.close(RequestId("b"), Attempt(1))
    fence.close(RequestId("c"), Attempt(1))
    assert not fence.bars(RequestId("a"), Attempt(1))


def test_an_illegal_phase_raises_with_the_history() -> None:
    member = sequence("a", 1)
    member.move("prefilling")
    with pytest.raises(IllegalStep, match="a: waiting → prefilling → returning"):
        member.move("returning")


def test_ranks_are_complete_when_all_are_ready_and_count_with_the_least_of_each() -> None:
    ranks = Ranks(ENGINE, None)
    assert ranks.assemble() is None
    ranks.heard(life(1, blocks=7, created=5, seqs=64), 0.0)
    ranks.heard(life(0, phase="starting"), 0.0)
    ranks.heard(life(0, engine=EngineId("other")), 0.0)
    assert ranks.assemble() is None
    ranks.heard(life(0, blocks=9), 0.1)
    assert ranks.assemble() == WorkersReady(CARD, 7, max_running=64, max_batch_tokens=None, world_size=2)


def test_ranks_draft_as_much_as_the_one_that_drafts_least() -> None:
    ranks = Ranks(ENGINE, None)
    for rank, (drafts, jump) in enumerate([(5, 8), (3, 16)]):
        said = life(rank)
        assert said.worker is not None
        worker = replace(said.worker, max_speculate=drafts, max_jump_ahead=jump)
        ranks.heard(replace(said, worker=worker), 0.0)
    ready = ranks.assemble()
    assert isinstance(ready, WorkersReady)
    assert (ready.max_speculate, ready.max_jump_ahead) == (3, 8)


def test_a_configured_world_size_is_waited_for() -> None:
    ranks = Ranks(ENGINE, 2)
    ranks.heard(life(0, world_size=1), 0.0)
    assert ranks.assemble() is None


def test_ranks_with_different_models_do_not_work_together() -> None:
    ranks = Ranks(ENGINE, None)
    ranks.heard(life(0), 0.0)
    ranks.heard(life(1, dtype="bfloat16"), 0.0)
    assert isinstance(ranks.assemble(), Unequal)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (life(1, incarnation=2, phase="starting"), "worker e-rank1: restarted"),
        (life(1, phase="failed"), "worker e-rank1: failed"),
        (life(1, phase="draining"), None),
        (life(1), None),
    ],
)
def test_a_member_that_is_not_what_it_was_is_lost(event: Lifecycle, reason: str | None) -> None:
    ranks = Ranks(ENGINE, None)
    ranks.heard(life(0), 0.0)
    ranks.heard(life(1), 0.0)
    ranks.assemble()
    assert ranks.heard(event, 0.5) == reason


def test_a_member_that_falls_silent_is_lost_once() -> None:
    ranks = Ranks(ENGINE, None)
    ranks.heard(life(0), 0.0)
    ranks.heard(life(1), 0.0)
    ranks.assemble()
    ranks.heard(life(0), 2.5)
    assert ranks.expire(2.6) == "worker e-rank1: silent for 2 s"
    assert ranks.expire(9.0) is None


def started(limits: Limits) -> Engine:
    engine = Engine(ENGINE, Incarnation(1), limits)
    engine.handle(WorkersReady(CARD, 64, max_running=3, max_batch_tokens=40), 0.0)
    return engine


def new_in(outputs: list[Output]) -> list[int]:
    return [len(o.plan.new) for o in outputs if isinstance(o, SendPlan)]


def test_workers_that_hold_less_bound_the_engine() -> None:
    engine = started(Limits(max_running=10, max_batch_tokens=64))
    report = engine.report()
    assert report is not None
    assert report.max_running == 3
    (plan, *_) = engine.handle(generate("a", [4] * 60), 0.0)
    assert isinstance(plan, SendPlan)
    assert plan.plan.work[0].count == 40


def test_one_plan_carries_only_so_many_bytes_of_new_prompts() -> None:
    engine = started(Limits(max_running=10, max_batch_tokens=64, max_new_bytes=100, run_ahead=0))
    engine.handle(generate("first", [4] * 4, max_tokens=5), 0.0)
    engine.handle(generate("a", [4] * 30, max_tokens=1), 0.0)
    engine.handle(generate("b", [5] * 4, max_tokens=1), 0.0)
    assert engine.serving is not None
    planned = engine.serving.planner.plan(0.0)
    assert planned is not None
    assert [len(n.tokens) for n in planned.new] == [120], "a single one always may, a second one may not"


def test_a_gateway_that_is_gone_takes_its_requests_along() -> None:
    engine = started(Limits(max_running=10, max_batch_tokens=64))
    engine.handle(generate("a", [4] * 20), 0.0)
    (tokens,) = engine.handle(GatewayGone(GATEWAY), 0.0)
    assert isinstance(tokens, SendTokens)
    assert [a.request for a in tokens.batch.abandoned] == ["a"]
    assert not engine.requests


def test_a_broken_pool_is_noticed() -> None:
    engine = started(Limits(max_running=10, max_batch_tokens=64))
    engine.handle(generate("a", [4] * 20), 0.0)
    check(engine)
    engine.requests[RequestId("a")].blocks.pop()
    with pytest.raises(BrokenInvariant):
        check(engine)


def test_a_scheduler_is_its_engine() -> None:
    config = load_config("scheduler", SchedulerConfig, ["--instance=engine-1", "--policy=priority"], {})
    assert (config.engine_id(), config.limits().policy) == ("engine-1", "priority")
    with pytest.raises(ConfigError, match="must be the instance name"):
        load_config("scheduler", SchedulerConfig, ["--instance=engine-1", "--engine=engine-2"], {})


def test_limits_that_contradict_each_other_stop_the_start() -> None:
    with pytest.raises(ConfigError, match=r"max_batch_tokens \(8\) must be at least max_running \(256\)"):
        load_config("scheduler", SchedulerConfig, ["--max-batch-tokens=8"], {})


def test_a_plan_may_wait_for_half_of_the_shortest_recent_step_of_its_size() -> None:
    pace = Pace()
    assert pace.patience(16) == 0.0, "a size that was not seen yet"
    for seconds in (0.03, 0.02, 0.05):
        pace.took(17, seconds)
    assert pace.patience(31) == 0.01
    assert pace.patience(32) == 0.0
    for _ in range(8):
        pace.took(17, 0.1)
    assert pace.patience(16) == 0.05, "only the last ones count"


def test_a_plan_is_never_so_late_that_the_device_would_wait_for_it() -> None:
    pace = Pace()
    pace.took(1, 0.010)
    assert pace.patience(1) == pytest.approx(0.004)
    pace.took(1, 0.0065)
    assert pace.patience(1) == 0.0, "half a millisecond is not worth a timer"
    pace.took(1, 0.003)
    assert pace.patience(1) == 0.0


def test_the_plan_behind_two_steps_may_wait_until_the_second_is_half_over() -> None:
    pace = Pace()
    pace.took(1, 0.04)
    assert pace.patience(1, 16) == 0.0, "nobody knows how long the second takes"
    pace.took(16, 0.03)
    assert pace.patience(1, 16) == pytest.approx(0.055)


def test_steps_that_are_shorter_than_the_way_of_a_plan_are_planned_two_ahead_at_once() -> None:
    pace = Pace()
    pace.took(1, 0.0015)
    assert pace.patience(1, 1) == 0.0
    pace.took(16, 0.005)
    assert pace.patience(16, 16) == pytest.approx(0.004), "a third plan is made when the first is nearly over"


def test_the_plan_ahead_waits_and_takes_in_who_came_meanwhile() -> None:
    engine = started(Limits(max_running=10, max_batch_tokens=64))
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
    engine = started(Limits(max_running=10, max_batch_tokens=64, plan_late=False))
    worker = HonestWorker(64)
    plans = [o.plan for o in engine.handle(generate("a", [4] * 8, ignore_eos=True), 0.0) if isinstance(o, SendPlan)]
    for now in range(1, 9):
        outputs = engine.handle(worker.step(plans.pop(0)), float(now))
        plans += [o.plan for o in outputs if isinstance(o, SendPlan)]
        assert len(plans) == 2
