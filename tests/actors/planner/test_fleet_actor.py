"""The planner on a bus: what it says, and what it asks a coordinator for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from msgspec.structs import replace

from services.planner.actor import FleetActor
from services.planner.config import PlannerSettings
from services.planner.fleet_scaler import FleetScaler, ScalingFailed
from shared import topics
from shared.bus import EndpointError
from shared.bus.memory_bus import MemoryBus
from shared.messages.supervisor import PlannerDecision
from shared.models.profile_file import ProfileFile
from tests.support.engines.planner_profiles import PROFILE_FILE, report
from tests.support.settled import settled
from tests.unit.planner.core.test_fleet_watch import life, rank, sums

SETTINGS = PlannerSettings(
    ttft_ms=300, itl_ms=30, interval_s=10, start_s=10, stabilization_s=20, max_engines=4, act=True
)


class Fleet:
    """An engine, and a coordinator that is asked."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.asked: list[object] = []
        self.said: list[PlannerDecision] = []
        self.notes: list[str] = []
        self.published: list[PlannerDecision] = []
        self.refusal: str | None = None
        self.scaler: FleetScaler | None = None
        self.hosts: list[str] = []
        """Those that have joined, with a KV store and no engines."""
        self.now = 0.0
        self.measured: ProfileFile | None = None

    def planner(self, settings: PlannerSettings = SETTINGS) -> FleetActor:
        say, note = self.said.append, self.notes.append
        return FleetActor(self.bus, settings, say, note, lambda: self.now, self.scaler, self.measured)

    async def scale(self, body: bytes) -> bytes:
        self.asked.append(msgspec.json.decode(body))
        if self.refusal is not None:
            raise EndpointError(409, self.refusal)
        return b"{}"

    async def see(self, decision: PlannerDecision) -> None:
        self.published.append(decision)

    async def works(self, requests: int) -> None:
        """It has answered so many requests by now."""
        served = replace(report(requests, ttft=0.1, itl=0.02), blocks_total=9999, max_running=16)
        await self.bus.publish(topics.lifecycles(), life("scheduler", "engine-1", engine=served))
        await self.bus.publish(topics.lifecycles(), rank("engine-1", sums(100 * requests, requests)))
        for host in self.hosts:
            await self.bus.publish(topics.lifecycles(), life("kvstore", f"{host}-kvstore-1"))
        await self.bus.flush()
        await settled()


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    bus = MemoryBus()
    fleet = Fleet(bus)
    await bus.serve_micro("admin", "1.0.0", "", {f"{topics.ADMIN}.scale": fleet.scale})
    await bus.subscribe(topics.planner_decisions(), fleet.see)
    yield fleet
    await bus.close()


async def decided(fleet: Fleet, settings: PlannerSettings = SETTINGS) -> PlannerDecision:
    """After a rise of the load from nothing to 20 requests per second, which is more than one engine can do."""
    planner = fleet.planner(settings)
    listening = asyncio.create_task(planner.run())
    await settled()
    await fleet.works(0)
    assert await planner.decide() is None
    await fleet.works(1)
    first = await planner.decide()
    assert first is not None
    assert not first.changes
    fleet.now = 10.0
    await fleet.works(201)
    second = await planner.decide()
    listening.cancel()
    assert second is not None
    await settled()
    return second


async def test_more_engines_are_asked_for_and_the_decision_is_an_event(fleet: Fleet) -> None:
    decision = await decided(fleet)
    assert decision.observed_rate == pytest.approx(20.0)
    (pool,) = decision.changes
    assert fleet.asked == [{"service": "engines", "count": pool.target}]
    assert pool.target > 1
    assert fleet.said == fleet.published
    assert fleet.said[-1] == decision
    assert decision.acts
    assert fleet.notes == ["learning how long steps take: 0 seen"]


async def test_a_dry_run_says_the_same_and_asks_for_nothing(fleet: Fleet) -> None:
    decision = await decided(fleet, replace(SETTINGS, act=False))
    assert decision.changes
    assert not decision.acts
    assert fleet.asked == []
    assert fleet.published[-1] == decision


async def test_a_refusal_is_noted_and_the_planner_goes_on(fleet: Fleet) -> None:
    fleet.refusal = "no device is left"
    await decided(fleet)
    assert fleet.notes[-1].endswith("is refused: no device is left")


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "--ttft-ms, --itl-ms: at least one target is needed"),
        ({"ttft_ms": 9, "min_engines": 3, "max_engines": 2}, "--max-engines 2: must not be below --min-engines"),
        ({"ttft_ms": 9, "min_engines": 3, "gpu_budget": 2}, "--gpu-budget 2: must not be below --min-engines"),
        ({"ttft_ms": 9, "load_predictor": "seasonal", "season_s": 60.0}, "season = 4 intervals"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        PlannerSettings(**fields)


async def test_engines_come_to_the_host_that_joined_and_has_none(fleet: Fleet) -> None:
    fleet.hosts = ["b"]
    decision = await decided(fleet, replace(SETTINGS, max_engines_per_host=1))
    (pool,) = decision.changes
    assert pool.target > 2
    assert fleet.asked == [{"service": "engines", "count": 1, "host": "b"}]
    assert "engines: no host has room for more than 2" in fleet.notes


async def test_whoever_places_engines_itself_is_asked_for_all_of_them(fleet: Fleet) -> None:
    asked: list[tuple[str, int, str | None]] = []

    class Orchestrator:
        places_engines = True

        async def scale(self, pool: str, count: int, host: str | None) -> None:
            asked.append((pool, count, host))
            raise ScalingFailed("it throttles")

    fleet.scaler = Orchestrator()
    decision = await decided(fleet)
    (pool,) = decision.changes
    assert asked == [("engines", pool.target, None)]
    assert fleet.asked == []
    assert fleet.notes[-1] == f"engines={pool.target} is not answered: it throttles"


async def test_with_a_measured_profile_nothing_has_to_be_learnt(fleet: Fleet) -> None:
    served = report(1)
    engine = replace(PROFILE_FILE.engine, model=served.model.name, block_size=served.model.block_size)
    fleet.measured = replace(PROFILE_FILE, engine=engine)
    planner = fleet.planner()
    listening = asyncio.create_task(planner.run())
    await settled()
    await fleet.works(1)
    decision = await planner.decide()
    listening.cancel()
    assert decision is not None
    assert (decision.profile, decision.profile_note, fleet.notes) == ("measured", "", [])


async def test_a_profile_of_other_engines_is_noted_once_and_steps_count_instead(fleet: Fleet) -> None:
    fleet.measured = replace(PROFILE_FILE, engine=replace(PROFILE_FILE.engine, model="other"))
    decision = await decided(fleet)
    assert decision.profile == "live"
    assert decision.profile_note.startswith("model: other was profiled, ")
    assert len([note for note in fleet.notes if note.startswith("the profile is of other engines")]) == 1
