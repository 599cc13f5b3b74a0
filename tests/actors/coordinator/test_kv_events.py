"""Engines tell, coordinators follow: a real scheduler on the bus, lost events, coordinators that come later."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from services.coordinator.actor import CoordinatorActor
from services.coordinator.config import CoordinatorConfig
from shared import topics
from shared.actor import ActorRuntime
from shared.bus import Bus, UndeliveredHandler
from shared.bus.memory_bus import MemoryBus
from shared.ids import EngineId, GatewayId, InstanceId, ModelName
from shared.messages.coordinator import Route
from shared.messages.gateway import RequestPlaced
from shared.messages.kv_events import KvDump, KvDumpRequest, KvEvents
from shared.messages.lifecycle import Lifecycle
from shared.messages.scheduler import GenerateRequest
from shared.telemetry.metrics import service_registry
from tests.support.engines.checking_worker import DETOKENIZER, generate
from tests.support.engines.coordinator_events import detokenizer, engine
from tests.support.engines.engine_on_a_bus import ENGINE, EngineOnABus, engine_on_a_bus, make_model, sim_backend

PROMPT = [2 + i % 28 for i in range(100)]
BLOCKS = 6
"""Full ones in PROMPT."""
SOURCE = InstanceId(ENGINE)
MODEL = ModelName("m")


class CoordinatorsBus:
    """The shared bus as a coordinator's own connection, on which events may be lost."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus
        self.lose: Callable[[KvEvents], bool] = lambda event: False
        self.heard: list[KvEvents | KvDump] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    def on_undelivered(self, handler: UndeliveredHandler) -> None:
        pass

    async def subscribe(self, topic: Any, handler: Any, *, offer: Any = None) -> Any:
        async def hear(message: Any) -> None:
            if isinstance(message, KvEvents) and self.lose(message):
                return
            if isinstance(message, KvEvents | KvDump):
                self.heard.append(message)
            await handler(message)

        return await self._bus.subscribe(topic, hear)


class Following:
    """A coordinator beside the engine."""

    def __init__(self, world: EngineOnABus, name: str = "coordinator-1") -> None:
        self.bus = CoordinatorsBus(world.bus)
        self.actor = CoordinatorActor(cast(Bus, self.bus), InstanceId(name), CoordinatorConfig())
        self.runtime = ActorRuntime(self.actor, drain_timeout=1.0)
        self._world = world
        self._task = asyncio.create_task(self.runtime.run())

    def known(self, request: GenerateRequest) -> int:
        """Leading blocks that it believes the engine to hold."""
        hashes = request.generation.block_hashes
        return self.actor.core.sources.hits(MODEL, hashes, len(hashes)).engines.get(SOURCE, 0)

    async def knows(self, request: GenerateRequest, blocks: int) -> None:
        await self._world.until(lambda: self.known(request) == blocks, f"{blocks} blocks are known")

    async def stop(self) -> None:
        self.runtime.stop()
        await self._task


@pytest.fixture
async def world(memory_bus: MemoryBus, tmp_path: Path) -> AsyncIterator[EngineOnABus]:
    model = make_model(tmp_path / "model")
    async with engine_on_a_bus(memory_bus) as engine_:
        engine_.add_worker(lambda: sim_backend(model))
        await engine_.ready()
        yield engine_


@contextlib.asynccontextmanager
async def following(world: EngineOnABus, name: str = "coordinator-1") -> AsyncIterator[Following]:
    coordinator = Following(world, name)
    try:
        yield coordinator
    finally:
        await coordinator.stop()


async def test_what_an_engine_computes_is_known_to_a_coordinator(world: EngineOnABus) -> None:
    async with following(world) as coordinator:
        first = generate("r1", PROMPT, max_tokens=4)
        await world.generate(first)
        await coordinator.knows(first, BLOCKS)
        assert coordinator.known(generate("other", PROMPT[:40] + PROMPT, max_tokens=1)) == 2


async def test_a_new_coordinator_learns_all_by_asking(world: EngineOnABus) -> None:
    first = generate("r1", PROMPT, max_tokens=4)
    await world.generate(first)
    async with following(world, "coordinator-1") as early:
        await early.knows(first, BLOCKS)
    async with following(world, "coordinator-2") as late:
        await late.knows(first, BLOCKS)
        assert late.actor.core.sources.is_complete(SOURCE)
        assert [type(message) for message in late.bus.heard] == [KvDump]
        second = generate("r2", PROMPT[::-1], max_tokens=4)
        await world.generate(second)
        await late.knows(second, BLOCKS)
        assert late.actor.core.sources.gaps == 0


async def test_a_lost_event_is_made_good_by_a_dump(world: EngineOnABus) -> None:
    async with following(world) as coordinator:
        sources = coordinator.actor.core.sources
        await world.until(lambda: sources.is_complete(SOURCE), "the engine is followed")
        lost: list[KvEvents] = []
        coordinator.bus.lose = lambda event: not lost and not lost.append(event)  # type: ignore[func-returns-value]
        first, second = generate("r1", PROMPT, max_tokens=2), generate("r2", PROMPT[::-1], max_tokens=2)
        await world.generate(first)
        await world.until(lambda: bool(lost), "an event is lost")
        assert coordinator.known(first) == 0
        await world.generate(second)
        await coordinator.knows(first, BLOCKS)
        await coordinator.knows(second, BLOCKS)
        assert (sources.gaps, sources.is_complete(SOURCE)) == (1, True)


async def test_a_new_epoch_of_the_engine_begins_with_nothing(world: EngineOnABus, tmp_path: Path) -> None:
    async with following(world) as coordinator:
        first = generate("r1", PROMPT, max_tokens=4)
        await world.generate(first)
        await coordinator.knows(first, BLOCKS)
        worker = next(name for name in world.runtimes if name != ENGINE)
        last = world.notes.lives[worker]
        await world.kill(worker)
        failed = msgspec.structs.replace(last, phase="failed")
        await world.bus.publish(topics.lifecycle_of("worker", InstanceId(worker)), failed)
        await world.until(lambda: world.scheduler.core.epoch_state is None, "the epoch ends")
        world.add_worker(lambda: sim_backend(tmp_path / "model"))
        await world.ready()
        await coordinator.knows(first, 0)
        again = generate("r2", PROMPT, max_tokens=4)
        await world.generate(again)
        await coordinator.knows(again, BLOCKS)


async def test_several_coordinators_that_ask_are_all_answered(world: EngineOnABus) -> None:
    first = generate("r1", PROMPT, max_tokens=4)
    await world.generate(first)
    await world.finished("r1")
    async with following(world, "coordinator-1") as one, following(world, "coordinator-2") as two:
        for name in ("coordinator-1", "coordinator-2", "nobody"):
            await world.bus.publish(topics.kv_dump_requests(SOURCE), KvDumpRequest(InstanceId(name)))
        await one.knows(first, BLOCKS)
        await two.knows(first, BLOCKS)


async def test_a_request_is_sent_where_its_blocks_are_and_finds_what_was_predicted(world: EngineOnABus) -> None:
    """The other engine is idle and would be cheaper but for them."""
    counted = _counted("device")
    placed: list[RequestPlaced] = []
    predicted: list[GenerateRequest] = []

    async def note(message: Any) -> None:
        (placed if isinstance(message, RequestPlaced) else predicted).append(message)

    gateway = GatewayId("gateway-of-this-test")
    await world.bus.subscribe(topics.gateway_inbox(gateway), note)
    await world.bus.subscribe(topics.engine_requests(ENGINE), note)
    async with following(world) as coordinator:
        first = generate("r1", PROMPT, max_tokens=4)
        await world.generate(first)
        await world.finished("r1")
        await coordinator.knows(first, BLOCKS)
        for life in (_other_engine(), detokenizer(DETOKENIZER)):
            await world.bus.publish(topics.lifecycle_of(life.service, life.instance), life)
        second = generate("r2", [*PROMPT, 5], max_tokens=4).generation
        route = Route(msgspec.structs.replace(second, gateway=gateway))
        await world.until(lambda: len(coordinator.actor.core.fleet.ready(MODEL)) == 2, "both engines are known")
        await world.bus.publish(topics.route(), route)
        await world.until(lambda: bool(placed), "it is placed")
        assert placed[0].engine == ENGINE
        await world.until(lambda: _counted("device") == counted + BLOCKS, "what was expected is counted")
        await world.finished("r2")
        assert predicted[-1].predicted_cached == BLOCKS * 16
        opened = {stream.request: stream for stream in world.notes.opened}
        assert opened[second.request].cached_tokens == BLOCKS * 16


def _counted(where: str) -> float:
    labels = {"policy": "kv", "where": where}
    return service_registry("coordinator").get_sample_value("baton_router_prompt_blocks_total", labels) or 0.0


def _other_engine() -> Lifecycle:
    return engine(EngineId("other"), model=MODEL, max_model_len=512, blocks_used=0)
