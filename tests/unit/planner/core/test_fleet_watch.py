"""A running fleet, as its processes' lifecycle messages show it, and what is learnt of its engines."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.planner.core.fleet_watch import FORGOTTEN_AFTER, FleetWatch
from services.planner.core.live_profile import MIN_STEPS, LiveProfile
from shared.ids import EngineId, Incarnation, InstanceId
from shared.messages.lifecycle import Lifecycle, Phase, Role, StepSums, WorkerReport
from tests.support.engines.coordinator_events import card, engine

STEP, TOKEN = 0.01, 0.00005


def sums(decodes: int, prompts: int = 0) -> StepSums:
    """After so many steps of 4 tokens, and so many of 1,000."""
    computed = 4 * decodes + 1000 * prompts
    steps = decodes + prompts
    return StepSums(
        steps=steps, prepare=0.1 * STEP * steps, forward=0.9 * STEP * steps + TOKEN * computed, computed=computed
    )


def rank(of: str, sums: StepSums, number: int = 0) -> Lifecycle:
    report = WorkerReport(
        engine=EngineId(of), rank=number, world_size=2, model=card(), num_blocks=100, device="sim", sums=sums
    )
    return life("worker", f"{of}-rank{number}", worker=report)


def worker(sums: StepSums) -> WorkerReport:
    report = rank("engine-1", sums).worker
    assert report is not None
    return report


def life(service: str, instance: str, phase: Phase = "ready", **more: object) -> Lifecycle:
    return Lifecycle(
        service=service, instance=InstanceId(instance), incarnation=Incarnation(1), phase=phase, pid=1, host="h",
        started=0.0, **more,
    )  # fmt: skip


def test_seconds_per_step_and_per_token_are_told_apart() -> None:
    live = LiveProfile()
    report = worker(sums(0))
    for decodes, prompts in ((0, 0), (40, 0), (60, 20), (100, 21)):
        live.record(InstanceId("engine-1-rank0"), replace(report, sums=sums(decodes, prompts)))
    profile = live.profile(engine("engine-1").engine, report)
    assert profile.itl(4, 100) == pytest.approx(STEP + 4 * TOKEN)
    assert profile.prefill(2048) == pytest.approx(STEP + 2048 * TOKEN)
    assert profile.prefill(8192) == pytest.approx(4 * STEP + 8192 * TOKEN)
    assert (profile.gpus, profile.max_num_seqs, profile.kv_tokens) == (2, 4, 1600)


def test_too_few_steps_say_nothing_and_steps_that_are_alike_only_how_long_they_take() -> None:
    live = LiveProfile()
    report = worker(sums(0))
    for decodes in (0, MIN_STEPS - 1):
        live.record(InstanceId("engine-1-rank0"), replace(report, sums=sums(decodes)))
    assert live.profile(engine("engine-1").engine, report) is None
    live.record(InstanceId("engine-1-rank0"), replace(report, sums=sums(2 * MIN_STEPS)))
    profile = live.profile(engine("engine-1").engine, report)
    assert profile.itl(1, 100) == pytest.approx(STEP + 4 * TOKEN)


def test_a_worker_that_began_anew_and_ranks_behind_the_first_teach_nothing() -> None:
    live = LiveProfile()
    report = worker(sums(500))
    live.record(InstanceId("engine-1-rank0"), report)
    live.record(InstanceId("engine-1-rank0"), replace(report, sums=sums(20)))
    live.record(InstanceId("engine-1-rank1"), replace(report, rank=1, sums=sums(0)))
    live.record(InstanceId("engine-1-rank1"), replace(report, rank=1, sums=sums(900)))
    assert live.steps == 0


def test_engines_that_start_are_present_and_drained_ones_only_reported() -> None:
    watch = FleetWatch()
    for message in (
        engine("engine-1", waiting=2),
        engine("engine-2", "draining"),
        life("scheduler", "engine-3", "starting"),
        life("coordinator", "coordinator-1", load=7),
        life("gateway", "gateway-1", load=9),
    ):
        watch.record(message, 0.0)
    seen = watch.observe(1.0)
    assert sorted(seen.reports) == ["engine-1", "engine-2"]
    assert seen.present == {"mixed": 2}
    assert seen.queued == 7


def test_what_stops_or_falls_silent_is_not_counted() -> None:
    watch = FleetWatch()
    watch.record(engine("engine-1"), 0.0)
    watch.record(engine("engine-2"), 4.0)
    assert watch.observe(FORGOTTEN_AFTER + 1.0).present == {"mixed": 1}
    watch.record(life("scheduler", "engine-2", "stopped"), FORGOTTEN_AFTER + 2.0)
    assert watch.observe(FORGOTTEN_AFTER + 2.0).present == {}


@pytest.mark.parametrize(("roles", "pools"), [(("mixed",), ("mixed",)), (("prefill", "decode"), ("prefill", "decode"))])
def test_pools_are_those_whose_engines_were_seen_at_work(roles: tuple[Role, ...], pools: tuple[Role, ...]) -> None:
    watch = FleetWatch()
    for role in roles:
        watch.record(engine(f"{role}-1", role=role), 0.0)
        watch.record(rank(f"{role}-1", sums(0)), 0.0)
    assert watch.profiles() is None
    for role in roles:
        watch.record(rank(f"{role}-1", sums(100, 10)), 1.0)
    assert watch.steps == 110 * len(roles)
    assert watch.profiles().roles == pools
    assert watch.profiles().gpus == 2


def test_engines_of_other_hosts_are_present_and_told_apart() -> None:
    watch = FleetWatch()
    for message in (engine("engine-1"), engine("gpu-2-engine-1"), life("scheduler", "gpu-2-engine-2", "starting")):
        watch.record(message, 0.0)
    assert watch.observe(1.0).present == {"mixed": 3}
    watch.record(life("kvstore", "gpu-3-kvstore-1"), 0.0)
    assert watch.by_host("mixed") == {None: 1, "gpu-2": 2, "gpu-3": 0}
    assert watch.by_host("decode") == {"gpu-3": 0}
    watch.record(life("scheduler", "gpu-2-engine-2", "draining"), 0.0)
    assert watch.by_host("mixed") == {None: 1, "gpu-2": 1, "gpu-3": 0}


def test_pods_are_all_of_one_place() -> None:
    watch = FleetWatch()
    assert watch.by_host("mixed") == {None: 0}
    for message in (engine("engine-0"), engine("engine-1"), life("kvstore", "engine-0-kvstore")):
        watch.record(message, 0.0)
    assert watch.by_host("mixed") == {None: 2}
