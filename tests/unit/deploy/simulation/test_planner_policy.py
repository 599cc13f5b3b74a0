"""The planner on simulated fleets: the profile that it measures, and what it makes of a load."""

from __future__ import annotations

from functools import partial

import pytest

from deploy.simulation.figures import device_seconds, outcomes, slo_attainment
from deploy.simulation.fleet import ScalingLimits
from deploy.simulation.kit import EnginePools
from deploy.simulation.planner_policy import PlannerScaling, planner_scaling, profile_simulated
from deploy.simulation.simulation import SimulationResult, simulate
from deploy.simulation.workloads import GeneratedLoad
from services.coordinator.config import CoordinatorConfig
from services.planner.core.sizing import LatencyTargets
from services.scheduler.core.limits import EngineLimits
from tests.support.engines.simulated_fleet import make_kit

TARGETS = LatencyTargets(ttft=0.25, itl=0.02)
LIMITS = ScalingLimits(maximum=5, interval=1.0, start_seconds=1.0, stabilization=4.0)
WAVE = GeneratedLoad(
    rate=14, seconds=60, arrivals="diurnal", period=30, swing=0.9, input_len=1500, output_len=12, range_ratio=0.1
)
POOL_WAVE = GeneratedLoad(
    rate=14, seconds=24, arrivals="diurnal", period=16, swing=0.9, input_len=1500, output_len=40, range_ratio=0.1
)
ENGINE = partial(make_kit, EngineLimits(max_running=16, run_ahead=2), 4000)


def simulated(policy: PlannerScaling | None, engines: int) -> SimulationResult:
    return simulate(ENGINE, CoordinatorConfig(), WAVE, engines=engines, policy=policy, start_seconds=1.0)


def test_the_profile_is_what_the_device_takes() -> None:
    profile = profile_simulated(ENGINE(), gpus=2)
    assert (profile.gpus, profile.max_num_seqs, profile.kv_tokens) == (2, 16, 64_000)
    assert profile.prefill(1024) == pytest.approx(0.005 + 1024 * 20e-6)
    assert profile.prefill(4090) == pytest.approx(2 * 0.005 + 4090 * 20e-6, rel=0.01)  # in two chunks
    assert profile.itl(16, 512) == pytest.approx(0.005 + 16 * 20e-6)


def test_the_fleet_follows_the_load_within_its_targets_and_no_request_is_lost() -> None:
    policy = planner_scaling(ENGINE(), 1, TARGETS, LIMITS, "constant", 30.0)
    planned = simulated(policy, 1)
    assert not any(record.error for record in planned.records.values())
    assert len(planned.records) == len(planned.sent) > 500
    attained = slo_attainment(outcomes(planned), {"ttft": TARGETS.ttft, "tpot": TARGETS.itl})["all"]
    assert attained > 0.8
    used = sum(device_seconds(life, planned.seconds) for life in planned.lives.values())
    assert used < 0.9 * 2 * planned.seconds
    counts = {decision.pools[0].target for decision in policy.decisions}
    assert min(counts) == 1
    assert max(counts) >= 2


def test_pools_follow_the_load_apart_and_no_request_is_lost() -> None:
    kit = partial(
        make_kit,
        EngineLimits(max_running=8, run_ahead=2),
        4000,
        pools=EnginePools(prefill=1, decode=1),
        store_blocks=8192,
    )
    policy = planner_scaling(kit(), 1, TARGETS, LIMITS, "constant", 30.0)
    routing = CoordinatorConfig()
    planned = simulate(kit, routing, POOL_WAVE, engines=2, policy=policy, start_seconds=1.0)
    assert not any(record.error for record in planned.records.values())
    assert len(planned.records) == len(planned.sent) > 200
    assert all(record.output_tokens == len(record.token_times) for record in planned.records.values())
    lives = planned.lives.values()
    assert {life.role for life in lives} == {"prefill", "decode"}
    for role in ("prefill", "decode"):
        counts = {pool.target for decision in policy.decisions for pool in decision.pools if pool.role == role}
        assert max(counts) > min(counts) == 1
        assert any(life.stopped is not None for life in lives if life.role == role)
    attained = slo_attainment(outcomes(planned), {"ttft": TARGETS.ttft, "tpot": TARGETS.itl})["all"]
    assert attained > 0.8
