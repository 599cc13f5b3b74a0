"""A fleet with slow engines, simulated: they get their share, clients wait less long, and equals lose nothing."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

from deploy.simulation.kit import SlowEngines
from deploy.simulation.simulation import SimulationResult
from deploy.simulation.workloads import GeneratedLoad
from services.bench.statistics import percentile
from services.coordinator.config import CoordinatorConfig
from tests.support.engines.simulated_fleet import run

ENGINES = 4
LOAD = GeneratedLoad(rate=60, seconds=4, input_len=400, output_len=60, seed=3)
FULL = GeneratedLoad(rate=130, seconds=4, input_len=400, output_len=60, seed=3)


@cache
def simulated(load: GeneratedLoad, *, speed: float, measured: bool) -> SimulationResult:
    routing = CoordinatorConfig(router_step_times=measured)
    return run(load, engines=ENGINES, routing=routing, blocks=2000, slow=SlowEngines(1, speed))


def share(result: SimulationResult) -> float:
    """Requests of the slow engine, as a multiple of what the others got in the mean."""
    placed = [sent.engine for sent in result.sent]
    slow = placed.count(result.totals[0].engine)
    return slow / ((len(placed) - slow) / (ENGINES - 1))


def between_tokens(result: SimulationResult) -> list[float]:
    times = [record.token_times for record in result.records.values()]
    return [after - before for each in times for before, after in pairwise(each)]


def first_tokens(result: SimulationResult) -> list[float]:
    return [result.records[sent.request.id].token_times[0] - sent.sent for sent in result.sent]


def test_a_slow_engine_gets_its_share_and_no_more() -> None:
    """Half of the others' where all are busy; less where the others have room, and never nothing."""
    before, after = (share(simulated(FULL, speed=0.5, measured=each)) for each in (False, True))
    assert 0.35 < after < 0.55
    assert after < before
    assert 0.1 < share(simulated(LOAD, speed=0.5, measured=True)) < 0.55


def test_clients_wait_less_long_for_first_tokens_and_between_tokens() -> None:
    for load in (LOAD, FULL):
        before, after = (simulated(load, speed=0.5, measured=each) for each in (False, True))
        assert percentile(between_tokens(after), 99) <= percentile(between_tokens(before), 99)
        assert percentile(first_tokens(after), 99) <= 1.02 * percentile(first_tokens(before), 99)


def test_equal_engines_are_placed_on_as_if_nothing_was_measured() -> None:
    placed = [[sent.engine for sent in simulated(FULL, speed=1.0, measured=each).sent] for each in (False, True)]
    assert placed[0] == placed[1]
