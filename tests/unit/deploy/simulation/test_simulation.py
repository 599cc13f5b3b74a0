"""A simulation: every request ends once, it is the same each time, and one process or several make no difference."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, get_args

import pytest

from deploy.simulation.cell import EngineCell
from deploy.simulation.front import RequestFront
from deploy.simulation.simulation import HEAD_START, Simulation, SimulationResult
from deploy.simulation.workloads import ConcurrentLoad
from services.bench.datasets.lengths import LengthDistribution
from services.coordinator.config import CoordinatorConfig, Policy
from services.scheduler.core.limits import EngineLimits
from shared.ids import EngineId
from tests.support.engines.simulated_fleet import CARD, LOAD, FixedLoad, make_kit, request, run


def pictures(result: SimulationResult) -> list[Any]:
    """All that is to be the same in two runs."""
    return [
        [(sent.request, sent.sent, sent.engine, sent.predicted_cached, sent.error) for sent in result.sent],
        [asdict(record) for _, record in sorted(result.records.items())],
        result.totals,
        result.seconds,
        result.peak,
    ]


def simulation(engines: int, load: FixedLoad, **kit: Any) -> Simulation:
    made = make_kit(**kit)
    front = RequestFront(CoordinatorConfig(), load, CARD.name, made.hops)
    front.orders += [front.fleet.start(0.0, -HEAD_START) for _ in range(engines)]
    return Simulation(front, [EngineCell(made)], made.hops)


def test_every_request_ends_once_with_all_its_tokens_and_nothing_stays_held() -> None:
    load = FixedLoad(tuple(LOAD.requests()))
    made = simulation(3, load, checked=True)
    result = made.run()
    assert len(result.sent) == len(load.given) == len(result.records) > 50
    for sent in result.sent:
        record = result.records[sent.request.id]
        assert record.error is None
        assert sent.error is None
        assert record.output_tokens == sent.request.output_tokens == len(record.token_times)
        assert record.prompt_tokens == sent.request.prompt_tokens
        assert record.engine == sent.engine
        assert list(record.token_times) == sorted(record.token_times)
        assert record.token_times[0] > sent.sent
    (cell,) = made.cells
    assert isinstance(cell, EngineCell)
    for engine in cell.engines.values():
        assert engine.core.idle
        assert not engine.core.requests
        report = engine.core.report()
        assert report is not None
        assert report.blocks_free == report.blocks_total


def test_the_same_load_gives_the_same_run() -> None:
    assert pictures(run()) == pictures(run())


def test_processes_that_share_the_engines_change_nothing() -> None:
    assert pictures(run(processes=2)) == pictures(run())


@pytest.mark.parametrize("policy", get_args(Policy))
def test_every_policy_ends_all_requests(policy: Policy) -> None:
    result = run(routing=CoordinatorConfig(router_policy=policy))
    assert len(result.records) == len(result.sent)
    assert {sent.engine for sent in result.sent} == {"engine-1", "engine-2", "engine-3"}


def test_beginnings_that_prompts_share_are_found_in_the_cache() -> None:
    result = run(engines=1)
    cached = [record.cached_tokens for record in result.records.values()]
    assert set(cached) <= {0, 256}
    assert cached.count(256) > len(cached) / 2
    assert not any(record.cached_tokens for record in run(LOAD_WITHOUT_PREFIXES).records.values())


LOAD_WITHOUT_PREFIXES = FixedLoad(tuple(request(number, number / 20) for number in range(40)))


def test_constant_concurrency_is_constant() -> None:
    load = ConcurrentLoad(concurrency=6, count=40, input_len=50, output_len=LengthDistribution("normal", 20, 60))
    result = run(load, engines=2)
    assert result.peak == 6
    assert len(result.records) == 40
    ends = sorted(record.token_times[-1] for record in result.records.values())
    starts = sorted(sent.sent for sent in result.sent)
    assert starts[:6] == [0.0] * 6
    assert starts[6:] == pytest.approx(ends[:34])


def test_a_fleet_that_is_full_lets_requests_wait_at_the_coordinator() -> None:
    load = FixedLoad(tuple(request(number, 0.0) for number in range(30)))
    result = run(
        load, engines=2, limits=EngineLimits(max_running=2, run_ahead=2), routing=CoordinatorConfig(engine_fill=1.0)
    )
    assert len(result.records) == 30
    assert not any(record.error for record in result.records.values())
    firsts = sorted(record.token_times[0] for record in result.records.values())
    assert firsts[-1] > 5 * firsts[0]


def test_a_request_that_no_engine_can_hold_is_refused() -> None:
    load = FixedLoad((request(0, 0.0), request(1, 0.1, prompt=CARD.max_model_len)))
    result = run(load)
    assert list(result.records) == ["r0"]
    assert "maximum context length" in (result.sent[1].error or "")


def test_an_engine_with_little_memory_preempts_and_still_ends_all() -> None:
    load = FixedLoad(tuple(request(number, 0.0, prompt=160, output=200) for number in range(6)))
    result = run(load, engines=1, blocks=60)
    assert all(record.output_tokens == 200 for record in result.records.values())
    assert len(result.records) == 6


def test_an_engine_is_drained_and_another_comes() -> None:
    load = FixedLoad(tuple(request(number, number / 10, output=40) for number in range(60)))
    made = simulation(2, load)
    made.front.orders += [made.front.fleet.start(2.0, 3.0), made.front.fleet.drain(EngineId("engine-1"), 3.0)]
    result = made.run()
    assert all(record.error is None for record in result.records.values())
    assert len(result.records) == 60
    late = {sent.engine for sent in result.sent if sent.sent > 3.1}
    early = {sent.engine for sent in result.sent if sent.sent < 2.9}
    assert late == {"engine-2", "engine-3"}
    assert early == {"engine-1", "engine-2"}
    stopped = result.lives[EngineId("engine-1")].stopped
    assert stopped is not None
    assert 3.0 < stopped < 4.5
    assert result.lives[EngineId("engine-3")].started == 2.0
