"""What the policies make of loads with shared prefixes, in simulated time: reuse, latency, and nobody starves."""

from __future__ import annotations

from functools import cache

import pytest

from services.coordinator.config import CoordinatorConfig, Policy
from tests.support.engines.routing_simulation import Load, Outcome, Simulation

MANY_PREFIXES = Load(rate=100, seconds=6)
"""More than one engine's memory holds, at about 70% of what eight engines compute without any reuse."""
LOADS = {
    "many prefixes": MANY_PREFIXES,
    "some popular": Load(rate=100, seconds=6, popularity=1.0),
    "one prefix": Load(rate=200, seconds=3, prefixes=1),
}


@cache
def outcome(load: str, policy: Policy, temperature: float = 0.0) -> Outcome:
    return Simulation(CoordinatorConfig(router_policy=policy, router_temperature=temperature), LOADS[load]).run()


@pytest.mark.parametrize("load", LOADS)
def test_no_engine_starves(load: str) -> None:
    """The one with the fewest requests gets at least half of the mean."""
    assert outcome(load, "kv").least_share >= 0.5


def test_a_temperature_starves_nobody_either() -> None:
    assert outcome("some popular", "kv", 0.1).least_share >= 0.5


@pytest.mark.parametrize("other", ["least-loaded", "round-robin"])
def test_prefixes_are_computed_less_often_and_answers_begin_sooner(other: Policy) -> None:
    ours, theirs = outcome("many prefixes", "kv"), outcome("many prefixes", other)
    assert ours.hit_rate > theirs.hit_rate + 0.25
    assert ours.first_token(0.5) < theirs.first_token(0.5) / 2
    assert ours.first_token(0.9) < theirs.first_token(0.9), "the first of each prefix included"


@pytest.mark.parametrize("load", LOADS)
def test_what_is_predicted_is_what_engines_find(load: str) -> None:
    """Give or take what is stored and evicted between the decision and the admission."""
    ours = outcome(load, "kv")
    assert ours.predicted == pytest.approx(ours.cached, rel=0.05)
