"""The policies by which an engine is chosen: who comes first, in which shares, and by what chance."""

from __future__ import annotations

import math
from collections import Counter
from typing import get_args

import pytest

from services.coordinator.config import CoordinatorConfig, Policy
from services.coordinator.core.coordinator import Coordinator
from services.coordinator.core.router import TieBreak, chance, pick
from shared.ids import Attempt, InstanceId, RequestId
from tests.support.engines.coordinator_events import at, detokenizer, engine, route, summary

MANY = 20_000


def chances(draw: str = "decode") -> list[float]:
    return [chance(RequestId(f"r{i}"), Attempt(1), draw) for i in range(MANY)]


def shares(temperature: float, costs: list[float], policy: Policy = "kv") -> list[float]:
    chosen = Counter(pick(policy, costs, temperature, TieBreak(0, each)) for each in chances())
    return [chosen[index] / MANY for index in range(len(costs))]


def test_chance_is_even_and_another_one_for_each_attempt_and_draw() -> None:
    drawn = chances()
    assert all(0 <= each < 1 for each in drawn)
    tenths = Counter(int(10 * each) for each in drawn)
    assert all(abs(count - MANY / 10) < 4 * math.sqrt(MANY / 10) for count in tenths.values())
    request = RequestId("r1")
    assert len({chance(request, Attempt(n), draw) for n in (1, 2) for draw in ("decode", "prefill")}) == 4
    assert chance(request, Attempt(1), "decode") == drawn[1]


@pytest.mark.parametrize("policy", get_args(Policy))
def test_a_single_engine_gets_everything(policy: Policy) -> None:
    assert pick(policy, [7.0], 1.0, TieBreak(5, 0.999_999)) == 0


def test_without_temperature_the_cheapest_is_taken_and_equals_in_turn() -> None:
    assert [pick("kv", [3, 1, 1], 0, TieBreak(turn, 0.9)) for turn in range(4)] == [1, 2, 1, 2]


@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
def test_with_temperature_shares_are_the_softmax_of_costs_scaled_to_one(temperature: float) -> None:
    weights = [math.exp(-scaled / temperature) for scaled in (0, 0.25, 1)]
    expected = [weight / sum(weights) for weight in weights]
    for costs in ([0, 25, 100], [1000, 1050, 1200]):
        for share, wanted in zip(shares(temperature, [float(c) for c in costs]), expected, strict=True):
            assert share == pytest.approx(wanted, abs=0.015)


def test_equal_costs_are_drawn_evenly() -> None:
    assert shares(0.5, [4.0, 4.0, 4.0, 4.0]) == pytest.approx([0.25] * 4, abs=0.015)


def test_random_knows_no_costs() -> None:
    assert shares(0, [0.0, 100.0], "random") == pytest.approx([0.5, 0.5], abs=0.015)


def test_round_robin_goes_round_whatever_the_load() -> None:
    lives = [engine("a", running=3), engine("b"), engine("c", waiting=2)]
    core = Coordinator(InstanceId("coordinator-1"), CoordinatorConfig(router_policy="round-robin"))
    for life in (*lives, detokenizer()):
        core.lifecycle(life, at(0))
    assert [summary(core.route(route(f"r{i}"), at(1)))[0][2] for i in range(6)] == list("abcabc")
