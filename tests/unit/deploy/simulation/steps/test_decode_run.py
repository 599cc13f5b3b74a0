"""Decode steps that are taken in by the shorter way: all is as it is by the core's own events, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.simulation.cell import CellOrder, CellState, DrainEngine, EngineCell
from deploy.simulation.front import RequestFront
from deploy.simulation.kit import EngineKit, EnginePools, SlowEngines
from deploy.simulation.prompts import PromptSegment, SimRequest
from deploy.simulation.simulation import HEAD_START, Simulation
from deploy.simulation.steps.decode_leap import DecodeLeap
from deploy.simulation.steps.decode_run import DecodeRun
from services.coordinator.config import CoordinatorConfig
from services.scheduler.core.limits import EngineLimits
from services.worker.sim.backend import SimBackend
from shared.messages.scheduler import StepFinished
from tests.support.engines.simulated_fleet import CARD, FixedLoad, make_kit, request


class WatchedCell(EngineCell):
    """Keeps all that was to be heard of its engines, and drains the first one once that time is simulated."""

    def __init__(self, kit: EngineKit, drained: float | None) -> None:
        super().__init__(kit)
        self.heard: list[Any] = []
        self._drained = drained

    def begin(self, orders: Sequence[CellOrder], until: float) -> None:
        if self._drained is not None and until > self._drained:
            orders, self._drained = [*orders, DrainEngine(0, until)], None
        super().begin(orders, until)

    def finish(self) -> CellState:
        state = super().finish()
        self.heard += sorted(state.news, key=lambda news: news[:3])
        return state


def core_pictures(cell: EngineCell) -> list[Any]:
    """Of each engine's core: what it counts and reports, its blocks with their names and order, and the steps that it
    remembers."""
    pictures: list[Any] = []
    for _, engine in sorted(cell.engines.items()):
        state = engine.core.epoch_state
        assert state is not None
        memory, steps = state.memory, state.steps
        pictures += [engine.core.snapshot(), engine.core.report(), list(state.recent_steps), engine.core.plan_due]
        pictures += [state.plans_in_flight, engine.next_at, engine.totals]
        pictures += [memory.pool.references, memory.pool.blank, list(memory.pool.cached), memory.index.hash_of]
        pictures += [steps.issued, steps.last_seconds, steps.next_due(1), memory.index.changes.changed]
    return pictures


def outcome(load: FixedLoad, kit: EngineKit, engines: int, drained: float | None = None) -> list[Any]:
    """All that comes of a load, in order. `drained`: when the first engine is."""
    cell = WatchedCell(kit, drained)
    front = RequestFront(CoordinatorConfig(), load, CARD.name, kit.hops)
    front.orders += [front.fleet.start(0.0, -HEAD_START, kit.pools.role_of(number)) for number in range(engines)]
    result = Simulation(front, [cell], kit.hops).run()
    records = [asdict(record) for record in result.records.values()]
    sent = [(each.sent, each.engine, each.predicted_cached, each.error) for each in result.sent]
    return [records, sent, result.totals, result.seconds, result.windows, cell.heard, core_pictures(cell)]


def reading_seconds(tokens: int, pairs: int, read: int, samples: int) -> float:
    """Each step of a sequence takes another time than the one before."""
    return 0.002 + 0.00001 * tokens + 0.0000007 * read + 0.0000001 * pairs


def both_ways(load: FixedLoad, engines: int, drained: float | None = None, **kit: Any) -> tuple[list[Any], list[Any]]:
    """The outcome as it is simulated; and by the core's own events alone, as it is where its invariants are checked."""
    made = make_kit(**kit)
    device = made.device
    device = SimBackend(CARD, device.num_blocks, reading_seconds, list(range(1, 1000)), "sim", kv=device.kv)
    shorter = outcome(load, made._replace(device=device), engines, drained)
    return shorter, outcome(load, made._replace(device=device, checked=True), engines, drained)


@st.composite
def requests(draw: st.DrawFn) -> FixedLoad:
    """A few requests within two seconds, of which some begin alike."""
    given: list[SimRequest] = []
    at = 0.0
    for number in range(draw(st.integers(1, 8))):
        at += draw(st.sampled_from([0.0, 0.001, 0.03, 0.4]))
        own = PromptSegment(1000 + number, draw(st.integers(1, 90)))
        shared = (PromptSegment(1, 64),) if draw(st.booleans()) else ()
        given.append(SimRequest(number, at, (*shared, own), draw(st.integers(1, 120))))
    return FixedLoad(tuple(given))


@given(
    load=requests(),
    engines=st.integers(1, 3),
    blocks=st.sampled_from([20, 24, 200]),
    limits=st.builds(
        EngineLimits,
        max_running=st.sampled_from([1, 3, 8]),
        max_batch_tokens=st.sampled_from([16, 64, 2048]),
        run_ahead=st.integers(0, 2),
        plan_late=st.booleans(),
        itl_target=st.sampled_from([None, 0.004]),
        long_prefill_token_threshold=st.sampled_from([0, 8]),
    ),
    pools=st.sampled_from([None, None, None, EnginePools(prefill=1, decode=1)]),
    slow=st.sampled_from([SlowEngines(), SlowEngines(1, 0.3)]),
    drained=st.sampled_from([None, 0.2]),
)
@settings(max_examples=40)
def test_every_load_comes_out_the_same(
    load: FixedLoad,
    engines: int,
    blocks: int,
    limits: EngineLimits,
    pools: EnginePools | None,
    slow: SlowEngines,
    drained: float | None,
) -> None:
    engines = engines if pools is None else pools.total
    store = 0 if pools is None else 64
    drained = drained if engines > 1 and pools is None else None
    shorter, whole = both_ways(
        load, engines, drained, limits=limits, blocks=blocks, pools=pools, slow=slow, store_blocks=store
    )
    assert shorter == whole


def test_memory_that_runs_out_is_taken_from_the_same_sequences_at_the_same_steps() -> None:
    load = FixedLoad(tuple(request(number, number / 50, prompt=160, output=200) for number in range(2)))
    shorter, whole = both_ways(load, 1, blocks=40)
    assert shorter == whole
    assert whole[-1][0].epoch.preemptions > 0


@pytest.mark.parametrize("late", [False, True])
def test_most_decodes_are_taken_in_at_once(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    single: list[StepFinished] = []
    leaps: list[DecodeLeap] = []
    finish, leap = DecodeRun.finish, DecodeRun.leap

    def counted(run: DecodeRun, result: StepFinished, now: float) -> Any:
        single.append(result)
        return finish(run, result, now)

    def watched(run: DecodeRun, *given: Any) -> DecodeLeap:
        leaps.append(leap(run, *given))
        return leaps[-1]

    monkeypatch.setattr(DecodeRun, "finish", counted)
    monkeypatch.setattr(DecodeRun, "leap", watched)
    load = FixedLoad(tuple(request(number, number / 4, output=300) for number in range(4)))
    shorter, whole = both_ways(load, 2, limits=EngineLimits(plan_late=late))
    assert shorter == whole
    steps = sum(totals.steps for totals in whole[2])
    at_once = sum(len(each.times) for each in leaps)
    assert at_once > 0.7 * steps > 500
    assert len(single) + at_once > 0.9 * steps
    assert {len(result.sampled) for result in single} == {1, 2}
