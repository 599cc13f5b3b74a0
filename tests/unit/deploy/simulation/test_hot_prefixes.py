"""A prefix that most requests have is computed at as many engines as its rate needs, and nobody waits for it."""

from __future__ import annotations

from functools import cache

import pytest

from deploy.simulation.simulation import SimulationResult
from deploy.simulation.workloads import GeneratedLoad
from services.bench.statistics import percentile
from tests.support.engines.simulated_fleet import run

HOT = 0
ENGINES = 4


@cache
def simulated(rate: float, hot_share: float, prefix_len: int = 512) -> SimulationResult:
    load = GeneratedLoad(
        rate=rate,
        seconds=3,
        input_len=64,
        output_len=30,
        prefixes=8,
        prefix_len=prefix_len,
        popularity=0,
        hot_share=hot_share,
        seed=3,
    )
    return run(load, engines=ENGINES, blocks=1200)


def first_tokens(result: SimulationResult) -> list[float]:
    return [result.records[sent.request.id].token_times[0] - sent.sent for sent in result.sent]


@pytest.mark.parametrize(("rate", "prefix_len"), [(80, 512), (30, 2048)])
def test_with_most_of_the_traffic_on_one_prefix_first_tokens_come_as_soon(rate: float, prefix_len: int) -> None:
    hot, balanced = (percentile(first_tokens(simulated(rate, share, prefix_len)), 99) for share in (0.8, 0.0))
    assert hot <= 1.5 * balanced


def engines_of_the_hot_prefix(rate: float) -> int:
    """Those that got a tenth of its requests, or more."""
    result = simulated(rate, 0.8)
    placed = [sent.engine for sent in result.sent if sent.request.segments[0].name == HOT]
    return sum(placed.count(engine) >= len(placed) / 10 for engine in set(placed))


def test_a_hot_prefix_is_spread_to_more_engines_the_more_often_it_is_asked_for() -> None:
    seldom, often = (engines_of_the_hot_prefix(rate) for rate in (3, 80))
    assert seldom < often == ENGINES


def test_it_is_computed_a_few_times_and_no_more() -> None:
    """Once for each engine, and again for what came before the first of them had it."""
    result = simulated(80, 0.8)
    hot = [result.records[sent.request.id] for sent in result.sent if sent.request.segments[0].name == HOT]
    assert len(hot) > 150
    assert sum(record.cached_tokens < 512 for record in hot) <= 3 * ENGINES
