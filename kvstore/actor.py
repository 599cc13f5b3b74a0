"""The store's shell: questions in, the arenas asked, answers and events out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from kvstore import metrics
from kvstore.directory import StoreDirectory
from kvstore.memory_ahead import MemoryAhead
from kvstore.node_store import NodeStore
from kvstore.search import Answer, DeepSearch
from kvstore.spill import SpillAhead
from kvstore.tiers import Neighbours, Tier
from shared import topics
from shared.actor import Actor, Hears, Tick
from shared.bus import Bus
from shared.ids import InstanceId, NodeId
from shared.messages.kv_events import DumpRequest
from shared.messages.kvstore import (
    Attach,
    Commit,
    Find,
    KvStoreAnswer,
    Owner,
    Release,
    Reserve,
)
from shared.messages.lifecycle import Lifecycle, StoreReport
from shared.registry import Gone, Registry

CHECK_SECONDS, CHECK_EVERY = 0.002, 0.01
"""Of comparing found blocks with their checksums, at a time: questions wait no longer."""


class KvStoreActor(Actor):
    """Owns a `NodeStore`, and with it the arenas of one node. There is one on each node."""

    service = "kvstore"
    tick_every = 0.5

    def __init__(
        self,
        bus: Bus,
        instance: InstanceId,
        node: NodeId,
        directory: StoreDirectory,
        *,
        memory: int,
        lease_seconds: float = 10.0,
        tier: Tier | None = None,
        neighbours: Neighbours | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(bus, instance)
        announced_as = (instance, node, self.incarnation)
        self.store = NodeStore(directory, memory, lease_seconds, announced_as, tier=tier, clock=clock)
        self._search = DeepSearch(self.store, tier, neighbours)
        self._neighbours = neighbours
        self._memory = MemoryAhead(self.store)
        self._spill = None if tier is None else SpillAhead(self.store, tier)
        self._owners = Registry()

    def hears(self) -> Sequence[Hears[Any]]:
        return [
            Hears(topics.kvstore_questions(self.store.node), intake=True, asked=True),
            Hears(topics.kvstore_releases(self.store.node)),
            Hears(topics.kv_dump_requests(self.instance)),
            Hears(topics.lifecycles("scheduler")),
            Hears(topics.lifecycles("kvstore")),
        ]

    async def set_up(self) -> None:
        self.store.recover()

    async def background(self) -> None:
        """Compares what was found at the start with its checksums, while nobody asks; searches below the arena."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._search.run())
            tasks.create_task(self._memory.run())
            if self._spill is not None:
                tasks.create_task(self._spill.run())
            while self.store.check_some(CHECK_SECONDS):
                await asyncio.sleep(CHECK_EVERY)

    async def answer(self, question: Any) -> KvStoreAnswer | asyncio.Future[Answer]:
        with metrics.SECONDS.labels(type(question).__name__.lower()).time():
            answer = self._answer(question)
        await self._tell()
        return answer

    def _answer(self, question: Any) -> KvStoreAnswer | asyncio.Future[Answer]:
        match question:
            case Find():
                return self._search.answer(question)
            case Reserve():
                self._memory.wanted(question.layout)
                return self.store.reserve(question)
            case Commit():
                return self.store.commit(question)
            case Attach():
                return self.store.attach(question)
            case _:
                raise TypeError(f"a store is not asked a {type(question).__name__}")

    async def handle(self, message: Any) -> None:
        match message:
            case Release():
                self._search.released(message)
                self.store.release(message)
            case Lifecycle():
                self._heard(message)
            case DumpRequest():
                await self._tell_everything(message)
            case Tick():
                self._time_passed(message)
            case _:
                raise TypeError(f"a store hears no {type(message).__name__}")
        await self._tell()

    def _heard(self, message: Lifecycle) -> None:
        gone = self._owners.heard(message, self.bus.liveness_now())
        if gone is not None:
            self._gone(gone)
        if self._neighbours is not None:
            self._neighbours.heard(message)

    def _time_passed(self, tick: Tick) -> None:
        for gone in self._owners.expire(tick.alive_now):
            self._gone(gone)
        self.store.time_passed()
        metrics.note(self.store.report(), leases=len(self.store.core.leases), memory=self.store.core.room.memory)

    def _gone(self, gone: Gone) -> None:
        owner = Owner(gone.last.instance, gone.last.incarnation)
        self._search.owner_gone(owner)
        self.store.owner_gone(owner)
        if self._neighbours is not None:
            self._neighbours.gone(gone.last)

    async def _tell(self) -> None:
        for event in self.store.announcer.flush():
            await self.bus.publish(topics.kv_events(self.instance), event)

    async def _tell_everything(self, request: DumpRequest) -> None:
        # Both at once, before a search has time to land another block.
        events, dumps = self.store.announcer.flush(), self.store.announcer.dumps()
        for event in events:
            await self.bus.publish(topics.kv_events(self.instance), event)
        for dump in dumps:
            await self.bus.publish(topics.kv_dumps(request.asker), dump)

    async def tear_down(self) -> None:
        self.store.close()

    def is_idle(self) -> bool:
        return not self._search.running

    def load(self) -> int:
        return self._search.running

    def store_report(self) -> StoreReport:
        report = self.store.report()
        return report if self._neighbours is None else replace(report, transfer=self._neighbours.address)
