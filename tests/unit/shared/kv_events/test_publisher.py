"""When a holder of blocks publishes what it holds: changes at a bounded rate, dumps in pieces and for all who ask."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Coroutine, Iterator
from hashlib import blake2b
from typing import Any

import pytest

from shared import topics
from shared.blocks import BlockHash, split_hashes
from shared.bus.memory_bus import MemoryBus
from shared.ids import Incarnation, InstanceId, ModelName
from shared.kv_events import stream
from shared.kv_events.publisher import DUMP_PART_SECONDS, MAX_ASKERS, KvEventPublisher
from shared.kv_events.stream import KvEventStream
from shared.messages.kv_events import KV_EVENT_SECONDS, KvDump, KvDumpRequest, KvEvents, KvSource
from shared.messages.lifecycle import HeartbeatInterval
from tests.support.virtual_time import VirtualTimeLoop

ENGINE = InstanceId("engine-1")
ONE, TWO, THREE = InstanceId("coordinator-1"), InstanceId("coordinator-2"), InstanceId("coordinator-3")
BLOCKS_OF_A_PART = 3


def name(number: int) -> BlockHash:
    return BlockHash(blake2b(b"%d" % number, digest_size=16).digest())


class Holder:
    """Holds blocks, and a record of what the real publisher says of them, with the virtual time of each message."""

    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.held: dict[BlockHash, None] = {}
        self.stream = KvEventStream(KvSource(instance=ENGINE, model=ModelName("m"), node=None), Incarnation(1))
        self.publisher = KvEventPublisher(self.bus, ENGINE, self)
        self.dumps_begun = 0
        self.events: list[tuple[float, KvEvents]] = []
        self.parts: dict[InstanceId, list[tuple[float, KvDump]]] = {ONE: [], TWO: [], THREE: []}

    def flush(self) -> list[KvEvents]:
        return self.stream.flush()

    def dumps(self) -> Iterator[KvDump]:
        self.dumps_begun += 1
        return self.stream.dump(self.held)

    def store(self, *numbers: int) -> None:
        for number in numbers:
            self.held[name(number)] = None
            self.stream.changes.stored(name(number))
        self.publisher.record_change()

    def remove(self, *numbers: int) -> None:
        for number in numbers:
            del self.held[name(number)]
            self.stream.changes.removed(name(number))
        self.publisher.record_change()

    def ask(self, coordinator: InstanceId) -> None:
        self.publisher.request_dump(KvDumpRequest(coordinator))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self._record(topics.kv_events(ENGINE), self.events)
        for coordinator, parts in self.parts.items():
            await self._record(topics.kv_dumps(coordinator), parts)
        task = asyncio.create_task(self.publisher.run())
        try:
            yield
        finally:
            task.cancel()

    async def _record(self, topic: topics.Topic[Any], record: list[tuple[float, Any]]) -> None:
        async def note(message: Any) -> None:
            record.append((asyncio.get_running_loop().time(), message))

        await self.bus.subscribe(topic, note)


def on_virtual_time(story: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(story)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_HASHES", BLOCKS_OF_A_PART)


@pytest.mark.parametrize("interval", [None, 0.2])
def test_however_often_blocks_change_messages_come_at_a_bounded_rate(interval: float | None) -> None:
    async def story() -> None:
        holder = Holder()
        async with holder.running():
            if interval is not None:
                holder.publisher.set_interval(HeartbeatInterval(1.0, interval))
            for step in range(1000):
                holder.store(step % 2)
                await asyncio.sleep(0.0005)
                holder.remove(step % 2)
                holder.store(2 + step)
                await asyncio.sleep(0.0005)
                holder.remove(2 + step)
            holder.store(5000)
            await asyncio.sleep(1.0)
        expected = 1.0 / (interval or KV_EVENT_SECONDS)
        flushes = {at for at, _ in holder.events}
        assert expected / 2 < len(flushes) <= expected + 2
        assert len(holder.events) <= len(flushes) + 1, "one message each, beside the one that begins the epoch"
        assert [event.number for _, event in holder.events] == list(range(len(holder.events)))
        assert sum(len(event.stored) for _, event in holder.events) <= 16 * len(flushes) * 2, "nothing that has gone"
        assert holder.events[-1][1].stored == name(5000)

    on_virtual_time(story())


def test_those_who_ask_before_a_dump_begins_share_it_and_later_ones_get_the_next() -> None:
    async def story() -> None:
        holder = Holder()
        holder.store(*range(30))
        async with holder.running():
            holder.ask(ONE)
            await asyncio.sleep(DUMP_PART_SECONDS / 2)
            holder.ask(TWO)
            await asyncio.sleep(3 * DUMP_PART_SECONDS)
            assert holder.dumps_begun == 1
            assert 0 < len(holder.parts[ONE]) < 10, "it is under way"
            holder.ask(THREE)
            holder.store(100)
            await asyncio.sleep(60.0)
        assert holder.dumps_begun == 2
        assert [part for _, part in holder.parts[ONE]] == [part for _, part in holder.parts[TWO]]
        assert {part.number for _, part in holder.parts[ONE]} == {10}
        assert all_of(holder.parts[ONE]) == {name(number) for number in range(30)}
        assert all_of(holder.parts[THREE]) == {*map(name, range(30)), name(100)}
        assert holder.parts[THREE][0][0] > holder.parts[ONE][-1][0]

    on_virtual_time(story())


def test_a_dump_takes_its_time_and_what_changes_meanwhile_is_published() -> None:
    async def story() -> None:
        holder = Holder()
        holder.store(*range(300))
        async with holder.running():
            holder.ask(ONE)
            await asyncio.sleep(1.0)
            holder.store(1000)
            await asyncio.sleep(60.0)
        times = [at for at, _ in holder.parts[ONE]]
        assert len(times) == 100
        assert all(b - a >= DUMP_PART_SECONDS - 1e-9 for a, b in itertools.pairwise(times))
        stored = next(at for at, event in holder.events if name(1000) in split_hashes(event.stored))
        assert stored <= times[0] + 1.0 + 2 * KV_EVENT_SECONDS < times[-1]

    on_virtual_time(story())


def test_more_askers_than_are_remembered_ask_again() -> None:
    async def story() -> None:
        holder = Holder()
        async with holder.running():
            for number in range(MAX_ASKERS):
                holder.ask(InstanceId(f"other-{number}"))
            holder.ask(ONE)
            await asyncio.sleep(1.0)
            assert holder.parts[ONE] == []
            holder.ask(ONE)
            await asyncio.sleep(1.0)
            assert len(holder.parts[ONE]) == 1

    on_virtual_time(story())


def all_of(parts: list[tuple[float, KvDump]]) -> set[BlockHash]:
    return {hash_ for _, part in parts for hash_ in split_hashes(part.hashes)}
