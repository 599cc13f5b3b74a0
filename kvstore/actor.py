"""The store's shell: questions in, the arenas asked, answers and events out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstore import metrics
from kvstore.directory import StoreDirectory
from kvstore.node_store import NodeStore
from kvstore.tiers import Neighbours, Tier
from shared import topics
from shared.actor import Actor, Hears, Tick
from shared.blocks import HASH_BYTES
from shared.bus import Bus
from shared.ids import InstanceId, NodeId
from shared.messages.kv_events import DumpRequest
from shared.messages.kvstore import (
    Attach,
    Commit,
    Find,
    Found,
    KvStoreAnswer,
    Owner,
    Release,
    Reserve,
)
from shared.messages.lifecycle import Lifecycle, StoreReport
from shared.registry import Gone, Registry

SLOT_BYTES = 4
"""Of one slot in `Found.slots`."""
CHECK_SECONDS, CHECK_EVERY = 0.002, 0.01
"""Of comparing found blocks with their checksums, at a time: questions wait no longer."""


class KvStoreActor(Actor):
    """Owns a `NodeStore`, and with it the arenas of one node. There is one on each node."""

    service = "kvstore"
    tick_every = 0.25

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
        self._beside = [each for each in (tier, neighbours) if each is not None]
        self._owners = Registry()

    def hears(self) -> Sequence[Hears[Any]]:
        return [
            Hears(topics.kvstore_questions(self.store.node), intake=True, asked=True),
            Hears(topics.kvstore_releases(self.store.node)),
            Hears(topics.kv_dump_requests(self.instance)),
            Hears(topics.lifecycles()),
        ]

    async def set_up(self) -> None:
        self.store.recover()

    async def background(self) -> None:
        """Compares what was found at the start with its checksums, while nobody asks."""
        async with asyncio.TaskGroup() as tasks:
            for each in self._beside:
                tasks.create_task(each.run())
            while self.store.check_some(CHECK_SECONDS):
                await asyncio.sleep(CHECK_EVERY)

    async def answer(self, question: Any) -> KvStoreAnswer:
        with metrics.SECONDS.labels(type(question).__name__.lower()).time():
            answer = self._answer(question)
        await self._tell()
        return answer

    def _answer(self, question: Any) -> KvStoreAnswer:
        match question:
            case Find():
                return self._find(question)
            case Reserve():
                return self.store.reserve(question)
            case Commit():
                return self.store.commit(question)
            case Attach():
                return self.store.attach(question)
            case _:
                raise TypeError(f"a store is not asked a {type(question).__name__}")

    def _find(self, question: Find) -> KvStoreAnswer:
        found = self.store.find(question)
        if isinstance(found, Found):
            here = len(found.slots) // SLOT_BYTES
            self.store.count(here, 0, len(question.hashes) // HASH_BYTES - here)
        return found

    async def handle(self, message: Any) -> None:
        match message:
            case Release():
                self.store.release(message)
            case Lifecycle():
                self._heard(message)
            case DumpRequest():
                await self._tell()
                for dump in self.store.announcer.dumps():
                    await self.bus.publish(topics.kv_dumps(message.asker), dump)
            case Tick():
                self._time_passed(message)
            case _:
                raise TypeError(f"a store hears no {type(message).__name__}")
        await self._tell()

    def _heard(self, message: Lifecycle) -> None:
        gone = self._owners.heard(message, self.bus.liveness_now())
        if gone is not None:
            self._end_leases_of(gone)

    def _time_passed(self, tick: Tick) -> None:
        for gone in self._owners.expire(tick.alive_now):
            self._end_leases_of(gone)
        self.store.time_passed()
        metrics.note(self.store.report(), leases=len(self.store.core.leases), memory=self.store.core.room.memory)

    def _end_leases_of(self, gone: Gone) -> None:
        self.store.owner_gone(Owner(gone.last.instance, gone.last.incarnation))

    async def _tell(self) -> None:
        for event in self.store.announcer.flush():
            await self.bus.publish(topics.kv_events(self.instance), event)

    async def tear_down(self) -> None:
        self.store.close()

    def store_report(self) -> StoreReport:
        return self.store.report()
