"""One real arena, one real store, engines that write and read it; all of them killed at random moments."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable

from kvstore.arena.mapped_arena import MappedArena
from kvstore.core.layout import COMMITTED, FREE, geometry
from shared import topics
from shared.bus import Bus
from shared.bus.nats_connection import NatsOptions, connect
from shared.ids import Incarnation, InstanceId
from shared.messages.kvstore import LeaseOwner
from shared.messages.lifecycle import Lifecycle, StoreReport
from tests.support.cluster.nats_server import NatsServer
from tests.support.kv.arenas import chain, holds
from tests.support.kv.hammer import LAYOUT, PARENT, life_of
from tests.support.kv.store_process import StoreClient, StoreProcess
from tests.support.paths import REPOSITORY

SLOTS = 24
"""Of 40 blocks that the engines want there."""
MEMORY = geometry(LAYOUT, SLOTS).file_bytes
KILLS = 8
BETWEEN_KILLS = 60
"""Blocks read and written."""
PATIENCE = 60.0
SEED = 20261121


class Fire:
    """Owns the engines, and what they have told."""

    def __init__(self, bus: Bus, store: StoreProcess, nursery: asyncio.subprocess.Process) -> None:
        self.bus = bus
        self.store = store
        self.chance = random.Random(SEED)
        self.told: collections.Counter[str] = collections.Counter()
        self.reports: list[StoreReport] = []
        self._nursery = nursery
        self._alive: dict[int, int] = {}
        """Process ids."""
        self._lives: collections.Counter[int] = collections.Counter()

    async def listen(self) -> None:
        async def note(message: Lifecycle) -> None:
            if message.store is not None and message.store.node == self.store.node:
                self.reports.append(message.store)

        await self.bus.subscribe(topics.lifecycles(), note)

    async def follow(self) -> None:
        """Until cancelled."""
        assert self._nursery.stdout is not None
        while line := await self._nursery.stdout.readline():
            pid, event, number = line.decode().split()
            if event == "born":
                self._alive[int(number)] = int(pid)
            self.told[event] += int(number)

    async def bear(self, who: int) -> None:
        self._lives[who] += 1
        assert self._nursery.stdin is not None
        self._nursery.stdin.write(f"engine-{who} {self._lives[who]} {self.chance.random()}\n".encode())
        await self.until(lambda: who in self._alive)

    async def kill_one(self) -> None:
        """Half of the deaths are announced, the others are not: those leases run out."""
        who = self.chance.choice(sorted(self._alive))
        os.kill(self._alive.pop(who), signal.SIGKILL)
        if self.chance.random() < 0.5:
            owner = LeaseOwner(InstanceId(f"engine-{who}"), Incarnation(self._lives[who]))
            await self.bus.publish(topics.lifecycle_of("scheduler", owner.instance), life_of(owner, "failed"))
        await self.bear(who)

    async def kill_store(self) -> None:
        self.store.kill()
        absent = self.told["absent"]
        await self.until(lambda: self.told["absent"] > absent)
        self.store.start()

    async def kill_all(self) -> None:
        for pid in self._alive.values():
            os.kill(pid, signal.SIGKILL)
        self._alive.clear()

    async def progress(self) -> None:
        before = self.told["wrote"], self.told["read"]
        await self.until(lambda: self.told["wrote"] > before[0] and self.told["read"] >= before[1] + BETWEEN_KILLS)
        await asyncio.sleep(self.chance.random() * 0.01)

    async def nothing_is_held(self) -> None:
        """As a report says that was made from now on; of the next two the first may have been under way."""
        heard = len(self.reports) + 1
        await self.until(
            lambda: (self.reports[-1].reserved, self.reports[-1].pinned) == (0, 0) and len(self.reports) > heard
        )

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def fire(nats_url: str, store: StoreProcess) -> AsyncIterator[Fire]:
    """Three engines at work."""
    bus = await connect(NatsOptions(servers=(nats_url,)))
    nursery = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.kv.hammer", nats_url, store.node, str(store.directory)),
        cwd=REPOSITORY,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    burning = Fire(bus, store, nursery)
    try:
        store.start()
        await burning.listen()
        following = asyncio.create_task(burning.follow())
        for who in range(3):
            await burning.bear(who)
        yield burning
    finally:
        assert nursery.stdin is not None
        nursery.stdin.close()  # what it waits for: it and all engines are gone then
        await nursery.wait()
        await following
        await bus.close()
        print(store.log)  # for whoever reads why a test failed
        store.close()


async def test_no_read_is_torn_and_no_slot_leaks_whoever_is_killed(shared_nats: NatsServer) -> None:
    store = StoreProcess(shared_nats.url, "under-fire", "--lease-seconds", "1", memory=MEMORY)
    async with fire(shared_nats.url, store) as burning:
        for kill in range(KILLS):
            await burning.progress()
            await (burning.kill_store() if kill in (3, 6) else burning.kill_one())
        await burning.progress()
        await burning.kill_all()
        await burning.nothing_is_held()
        assert burning.told["torn"] == 0
        served = [report for report in burning.reports if report.slots]
        assert all(report.committed + report.reserved <= report.slots == SLOTS for report in served)
        arena = MappedArena.open(next(store.directory.glob("*.arena")))
        every_slot_is_free_or_holds_what_it_says(arena)
        await every_slot_can_be_had(burning)


def every_slot_is_free_or_holds_what_it_says(arena: MappedArena) -> None:
    headers = list(arena.headers())
    assert {header.state for _, header in headers} <= {FREE, COMMITTED}
    committed = [(slot, header) for slot, header in headers if header.state == COMMITTED]
    assert committed
    assert len({header.hash for _, header in committed}) == len(committed)
    for slot, header in committed:
        assert arena.is_sound(slot)
        assert holds(arena, slot, header.hash)
        assert header.parent == PARENT[header.hash]


async def every_slot_can_be_had(burning: Fire) -> None:
    client = StoreClient(burning.bus, burning.store, LAYOUT)
    await client.attach()
    names = chain("after the fire", SLOTS)
    assert await client.save(names) == SLOTS
    assert await client.found(names) == (SLOTS, 0)
