"""Real publishers and coordinators' real knowledge of them, on virtual time: whatever happens, the index is the truth.

Blocks come and go while dumps are on their way, messages are lost, engines begin anew, coordinators come late and
together. Whenever nothing is on its way, a coordinator that counts an engine as known knows exactly what it holds; and
so does each after a while without losses.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.coordinator.core import kv_sources
from services.coordinator.core.kv_sources import KvSources
from shared import topics
from shared.blocks import BlockHash
from shared.bus.memory_bus import MemoryBus
from shared.ids import Incarnation, InstanceId, ModelName
from shared.kv_events import stream
from shared.kv_events.publisher import KvEventPublisher
from shared.kv_events.stream import KvEventStream
from shared.messages.kv_events import KvDump, KvDumpRequest, KvEvents, KvSource
from shared.messages.lifecycle import HeartbeatInterval
from tests.support.virtual_time import VirtualTimeLoop

MODEL = ModelName("m")
ENGINES = (InstanceId("engine-1"), InstanceId("engine-2"))
COORDINATORS = (InstanceId("coordinator-1"), InstanceId("coordinator-2"))
BLOCKS = [BlockHash(bytes([number]) * 16) for number in range(200)]
"""So many that a wrong one is rarely put right by its next change."""
TICK = 0.5
SETTLED_SECONDS = 2.5
"""Without changes: all events are there by then."""
QUIET_SECONDS = 200.0


class Engine:
    """Holds blocks in epochs."""

    def __init__(self, bus: MemoryBus, instance: InstanceId) -> None:
        self.instance = instance
        self.publisher = KvEventPublisher(bus, instance, self)
        self._epoch = 0
        self.begin()

    def begin(self) -> None:
        self._epoch += 1
        self.held: dict[BlockHash, None] = {}
        source = KvSource(instance=self.instance, model=MODEL, node=None)
        self.stream = KvEventStream(source, Incarnation(self._epoch))
        self.publisher.record_change()

    def flush(self) -> list[KvEvents]:
        return self.stream.flush()

    def dumps(self) -> Iterator[KvDump]:
        return self.stream.dump(self.held)

    def turn_around(self, hash_: BlockHash) -> None:
        if hash_ in self.held:
            del self.held[hash_]
            self.stream.changes.removed(hash_)
        else:
            self.held[hash_] = None
            self.stream.changes.stored(hash_)
        self.publisher.record_change()


class Coordinator:
    """Follows the engines by messages of which some are lost."""

    def __init__(self, bus: MemoryBus, instance: InstanceId, losses: random.Random) -> None:
        self.instance = instance
        self.loses = 0.0
        self._bus = bus
        self._losses = losses
        self.begin()

    def begin(self) -> None:
        """It knows nothing, as one that has just been started."""
        self.sources = KvSources(limit=10_000)
        for engine in ENGINES:
            self.sources.follow(engine)

    async def listen(self) -> None:
        for engine in ENGINES:
            await self._bus.subscribe(topics.kv_events(engine), self._hear)
        await self._bus.subscribe(topics.kv_dumps(self.instance), self._hear)

    async def _hear(self, message: Any) -> None:
        if self._losses.random() >= self.loses:
            now = asyncio.get_running_loop().time()
            if isinstance(message, KvEvents):
                self.sources.record_events(message, now)
            else:
                self.sources.record_dump(message, now)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            for engine in self.sources.dumps_due(asyncio.get_running_loop().time()):
                await self._bus.publish(topics.kv_dump_requests(engine), KvDumpRequest(self.instance))

    def knows(self, engine: InstanceId) -> set[BlockHash]:
        return {hash_ for hash_ in BLOCKS if engine in self.sources.hits(MODEL, hash_, 1).engines}


Happening = st.one_of(
    st.tuples(st.just("blocks"), st.integers(0, 1), st.integers(1, 100)),
    st.tuples(st.just("epoch"), st.integers(0, 1), st.none()),
    st.tuples(st.just("coordinator"), st.integers(0, 1), st.none()),
    st.tuples(st.just("losses"), st.integers(0, 1), st.sampled_from([0.0, 0.0, 0.05, 1.0])),
    st.tuples(st.just("interval"), st.integers(0, 1), st.sampled_from([0.0, 0.2, 2.0])),
    st.tuples(st.just("settle"), st.integers(0, 1), st.none()),
)


@given(st.lists(Happening, max_size=20), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_after_any_order_of_events_gaps_dumps_and_deaths_the_index_is_the_truth(
    happenings: list[tuple[str, int, Any]], seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "MAX_HASHES", 4)
        patch.setattr(kv_sources, "MAX_HELD_EVENTS", 4)
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(_live_through(happenings, random.Random(seed)))


async def _live_through(happenings: list[tuple[str, int, Any]], chance: random.Random) -> None:
    bus = MemoryBus()
    engines = [Engine(bus, name) for name in ENGINES]
    coordinators = [Coordinator(bus, name, chance) for name in COORDINATORS]
    tasks = [asyncio.create_task(engine.publisher.run()) for engine in engines]
    for engine in engines:

        async def pass_on(request: KvDumpRequest, engine: Engine = engine) -> None:
            engine.publisher.request_dump(request)

        await bus.subscribe(topics.kv_dump_requests(engine.instance), pass_on)
    for coordinator in coordinators:
        await coordinator.listen()
        tasks.append(asyncio.create_task(coordinator.run()))
    for what, which, value in happenings:
        match what:
            case "blocks":
                await _change_blocks(engines[which], value, chance)
            case "epoch":
                engines[which].begin()
            case "coordinator":
                coordinators[which].begin()
            case "losses":
                coordinators[which].loses = value
            case "interval":
                engines[which].publisher.set_interval(HeartbeatInterval(1.0, value))
            case _:
                await _settle(engines, coordinators)
    await _settle(engines, coordinators)
    for _ in range(2):
        await asyncio.sleep(QUIET_SECONDS)
        for engine in engines:
            engine.turn_around(BLOCKS[0])
    await _settle(engines, coordinators)
    for engine in engines:
        assert all(coordinator.sources.is_complete(engine.instance) for coordinator in coordinators)
    for task in tasks:
        task.cancel()


async def _change_blocks(engine: Engine, changes: int, chance: random.Random) -> None:
    """Up to three each 20 ms, as long as a dump takes or longer."""
    for _ in range(changes):
        for hash_ in chance.sample(BLOCKS, chance.randrange(1, 4)):
            engine.turn_around(hash_)
        await asyncio.sleep(0.02)


async def _settle(engines: list[Engine], coordinators: list[Coordinator]) -> None:
    """Until all has been heard; what was lost last shows with the next event."""
    for coordinator in coordinators:
        coordinator.loses = 0.0
    await asyncio.sleep(SETTLED_SECONDS)
    for engine in engines:
        engine.turn_around(BLOCKS[0])
    await asyncio.sleep(SETTLED_SECONDS)
    for engine in engines:
        for coordinator in coordinators:
            if coordinator.sources.is_complete(engine.instance):
                assert coordinator.knows(engine.instance) == set(engine.held)
