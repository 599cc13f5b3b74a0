"""Fleets that grow and shrink: what is wanted, who is drained, and that no request is lost by it."""

from __future__ import annotations

from functools import partial

import pytest

from deploy.simulation.figures import device_seconds, peak_engines
from deploy.simulation.fleet import EngineLife, FleetView, QueueLengthScaling, ScalingLimits, StaticFleet
from deploy.simulation.simulation import SimulationResult, simulate
from deploy.simulation.workloads import GeneratedLoad
from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.engine_pool import EngineLoad
from shared.messages.lifecycle import Role
from tests.support.engines.coordinator_events import engine
from tests.support.engines.simulated_fleet import make_kit

LIMITS = ScalingLimits(maximum=8, interval=2.0, start_seconds=3.0, stabilization=6.0)
WAVE = GeneratedLoad(rate=12, seconds=80, arrivals="diurnal", period=40, swing=0.9, input_len=60, output_len=40)


def view(now: float, *running: int, starting: int = 0, queued: int = 0) -> FleetView:
    return FleetView(now, pool("mixed", *running), {"mixed": starting}, queued)


def pool(role: Role, *running: int) -> list[EngineLoad]:
    lives = [engine(f"{role}-{number + 1}", running=count, role=role) for number, count in enumerate(running)]
    return [EngineLoad.of(life, life.engine, CoordinatorConfig()) for life in lives]


def simulated(policy: QueueLengthScaling | None, engines: int) -> SimulationResult:
    kit = partial(make_kit)
    return simulate(kit, CoordinatorConfig(), WAVE, engines=engines, policy=policy, start_seconds=3.0)


def test_there_are_so_many_engines_that_each_has_its_target() -> None:
    policy = QueueLengthScaling(4.0, LIMITS)
    assert policy.wanted(view(0.0, 4, 4, queued=8)) == {"mixed": 4}
    assert policy.wanted(view(5.0, 4, 4, starting=2, queued=8)) == {"mixed": 4}
    assert policy.wanted(view(10.0, 4, 4, starting=2, queued=200)) == {"mixed": LIMITS.maximum}


def test_a_tenth_more_or_less_than_the_target_changes_nothing() -> None:
    policy = QueueLengthScaling(10.0, LIMITS)
    assert policy.wanted(view(0.0, 10, 11)) == {"mixed": 2}
    assert policy.wanted(view(5.0, 12, 11)) == {"mixed": 3}


def test_the_fleet_shrinks_to_the_most_that_was_wanted_lately() -> None:
    policy = QueueLengthScaling(4.0, LIMITS)
    assert policy.wanted(view(0.0, 4, 4, 4)) == {"mixed": 3}
    assert policy.wanted(view(5.0, 1, 0, 0)) == {"mixed": 3}
    assert policy.wanted(view(7.0, 1, 0, 0)) == {"mixed": 1}


def test_pools_are_counted_apart_and_what_waits_waits_for_prefill() -> None:
    policy = QueueLengthScaling(4.0, LIMITS)
    both = FleetView(0.0, [*pool("prefill", 2), *pool("decode", 4, 4)], {"decode": 1}, 10)
    assert both.present == {"prefill": 1, "decode": 3}
    assert policy.wanted(both) == {"prefill": 3, "decode": 2}


def test_a_static_fleet_stays_as_it_is() -> None:
    assert StaticFleet().wanted(view(0.0, 4, 40, starting=1)) == {"mixed": 3}


@pytest.fixture(scope="module")
def followed() -> SimulationResult:
    """A fleet that follows the load."""
    return simulated(QueueLengthScaling(2.0, LIMITS), 1)


def test_a_fleet_that_follows_the_load_loses_no_request_and_needs_fewer_devices(followed: SimulationResult) -> None:
    static = simulated(None, 4)
    assert len(followed.records) == len(followed.sent) == len(static.sent) > 700
    assert not any(record.error for record in followed.records.values())
    lives = list(followed.lives.values())
    assert peak_engines(lives, followed.seconds) >= 3
    assert any(life.stopped is not None for life in lives)
    for life in lives:
        assert life.stopped is None or life.started < (life.drained or 0.0) < life.stopped
    assert sum(device_seconds(life, followed.seconds) for life in lives) < 0.9 * 4 * static.seconds


def test_an_engine_takes_nothing_before_it_is_ready_or_once_it_is_drained(followed: SimulationResult) -> None:
    for sent in followed.sent:
        life = followed.lives[sent.engine]
        assert life.ready <= sent.sent + 0.01
        assert life.drained is None or sent.sent <= life.drained + 0.01


def test_devices_count_from_the_first_request_on() -> None:
    assert device_seconds(EngineLife(-5.0, -1.0), 100.0) == 100.0
    assert device_seconds(EngineLife(10.0, 12.0, 50.0, 60.0), 100.0) == 50.0


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="maximum = 1: must not be below minimum, which is 2"):
        ScalingLimits(minimum=2, maximum=1)
