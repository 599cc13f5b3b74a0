"""Engines are compared by their step times, and a slow one gets work for as long as the others, not as much of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.actions import PlaceRequest
from services.coordinator.core.coordinator import Coordinator
from services.coordinator.core.engine_slowdowns import (
    COMPARE_SECONDS,
    MEMORY_SECONDS,
    NO_SLOWDOWN,
    EngineSlowdowns,
    Slowdown,
)
from shared.ids import InstanceId
from shared.messages.lifecycle import EngineReport, StepTimeFit, StepTimesReport
from tests.support.engines.coordinator_events import at, detokenizer, engine, route


def fit(slowness: float, tokens: float = 20, blocks: float = 400) -> StepTimeFit:
    """Of an engine whose steps have so many tokens in the mean."""
    seconds = slowness * (0.004 + 0.0001 * tokens + 0.000001 * blocks)
    return StepTimeFit(tokens, blocks, seconds, slowness * 0.0001, slowness * 0.000001)


def times(prefill: float | None, decode: float | None, tokens: float = 20) -> StepTimesReport:
    return StepTimesReport(
        None if prefill is None else fit(prefill, 500), None if decode is None else fit(decode, tokens)
    )


def report(step_times: StepTimesReport | None, steps: int = 1) -> EngineReport:
    life = engine("any", steps=steps, step_times=step_times)
    assert life.engine is not None
    return life.engine


def compared(*reported: StepTimesReport | None) -> list[Slowdown]:
    slowdowns = EngineSlowdowns()
    names = [InstanceId(f"e{number}") for number in range(len(reported))]
    for name, each in zip(names, reported, strict=True):
        slowdowns.record(name, report(each), 0.0)
    slowdowns.compare(0.0)
    return [slowdowns.of(name) for name in names]


def test_paces_are_relative_to_the_median_engine_and_of_two_kinds() -> None:
    slowdowns = compared(times(1, 1), times(1, 1), times(1, 1), times(4, 2))
    assert slowdowns == [NO_SLOWDOWN, NO_SLOWDOWN, NO_SLOWDOWN, Slowdown(4, 2)]


@pytest.mark.parametrize("tokens", [2, 10, 40])
def test_an_engine_with_few_requests_is_compared_at_the_others_steps(tokens: float) -> None:
    slowdowns = compared(times(1, 1, tokens), *(times(1, 1) for _ in range(3)), times(2, 2, tokens))
    assert slowdowns == [NO_SLOWDOWN] * 4 + [Slowdown(2, 2)]


def test_engines_that_are_nearly_alike_have_one_pace() -> None:
    assert set(compared(*(times(1 + noise, 1 - noise) for noise in (0.0, 0.05, -0.05, 0.1, -0.1)))) == {NO_SLOWDOWN}


def test_an_engine_without_figures_has_the_medians_and_so_has_one_that_is_alone() -> None:
    assert compared(times(1, 1), None, times(None, 1), times(4, 4), times(1, 1))[1] == NO_SLOWDOWN
    assert compared(times(7, 7), None) == [NO_SLOWDOWN, NO_SLOWDOWN]
    assert compared(times(1, None), times(1, 3), times(3, None))[2].decode == 1


def test_paces_are_bounded() -> None:
    assert compared(times(1, 1), times(1, 1), times(1000, 0.001))[2] == Slowdown(8, 1 / 8)


def test_a_pace_that_wavers_between_two_grades_stays() -> None:
    slowdowns, found = EngineSlowdowns(), []
    for turn, slowness in enumerate((2.0, 2.2, 1.9, 2.15, 1.85)):
        for name, each in (("a", 1.0), ("b", 1.0), ("slow", slowness)):
            slowdowns.record(InstanceId(name), report(times(each, each), steps=turn), turn * COMPARE_SECONDS)
        changed = slowdowns.compare(turn * COMPARE_SECONDS)
        found.append((changed, slowdowns.of(InstanceId("slow"))))
    assert found == [(["slow"], Slowdown(2, 2)), *[([], Slowdown(2, 2))] * 4]


def test_what_an_idle_engine_measured_long_ago_is_forgotten_and_so_is_one_that_is_gone() -> None:
    slowdowns = EngineSlowdowns()
    for name in ("a", "b", "c"):
        slowdowns.record(InstanceId(name), report(times(1, 1)), 0.0)
    slowdowns.record(InstanceId("slow"), report(times(2, 2)), 0.0)
    slowdowns.compare(0.0)
    now = MEMORY_SECONDS + COMPARE_SECONDS
    for name in ("a", "b", "c"):
        slowdowns.record(InstanceId(name), report(times(1, 1), steps=2), now)
    slowdowns.record(InstanceId("slow"), report(times(2, 2)), now)
    assert slowdowns.of(InstanceId("slow")) == Slowdown(2, 2)
    assert slowdowns.compare(now) == ["slow"]
    assert slowdowns.of(InstanceId("slow")) == NO_SLOWDOWN
    slowdowns.record(InstanceId("slow"), report(times(2, 2), steps=2), now + 1)
    assert slowdowns.compare(now + 1) == ["slow"]
    slowdowns.forget(InstanceId("slow"))
    assert slowdowns.of(InstanceId("slow")) == NO_SLOWDOWN


def test_engines_are_compared_once_a_second_at_most() -> None:
    slowdowns = EngineSlowdowns()
    slowdowns.compare(0.0)
    for name, slowness in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        slowdowns.record(InstanceId(name), report(times(slowness, slowness)), 0.5)
    assert slowdowns.compare(0.9) == []
    assert slowdowns.compare(COMPARE_SECONDS) == ["c"]


def placements(config: CoordinatorConfig, slowness: Sequence[float], requests: int) -> Counter[str]:
    core = Coordinator(InstanceId("coordinator-1"), config)
    core.lifecycle(detokenizer(), at(0))
    for seconds in (0, COMPARE_SECONDS):
        for number, each in enumerate(slowness):
            reported = engine(
                f"e{number}", max_running=64, max_waiting=64, blocks_used=0, steps=1, step_times=times(each, each)
            )
            core.lifecycle(reported, at(seconds))
    now = at(COMPARE_SECONDS)
    return Counter(
        str(action.engine)
        for number in range(requests)
        for action in core.route(route(f"r{number}", prompt=40, seed=number), now)
        if isinstance(action, PlaceRequest)
    )


def test_an_engine_that_is_twice_as_slow_gets_half_the_work() -> None:
    config = CoordinatorConfig()
    assert placements(config, (1, 1, 1, 2), 70) == {"e0": 20, "e1": 20, "e2": 20, "e3": 10}
    assert placements(config, (1, 1, 1, 1.05), 80) == {f"e{number}": 20 for number in range(4)}


def test_without_the_setting_and_under_other_policies_all_engines_count_alike() -> None:
    for config in (CoordinatorConfig(router_step_times=False), CoordinatorConfig(router_policy="least-loaded")):
        assert set(placements(config, (1, 1, 1, 4), 40).values()) == {10}
