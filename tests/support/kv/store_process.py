"""Real KV store processes on a real bus, and an engine's side of their protocol, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvstore.arena.mapped_arena import MappedArena
from shared import topics
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.blocks import BlockHash
from shared.bus import Bus, NoResponders, ReplyTimeout
from shared.bus.nats_connection import NatsOptions, connect
from shared.ids import Incarnation, InstanceId, LeaseId, NodeId
from shared.messages.kvstore import (
    NO_SLOT,
    Attach,
    AttachReply,
    Commit,
    CommitReply,
    Find,
    FindReply,
    KvLayout,
    KvStoreReply,
    LeaseOwner,
    Prefetch,
    Release,
    Reserve,
    ReserveReply,
)
from shared.messages.lifecycle import Lifecycle, StoreReport
from tests.support.kv.arenas import MODEL, SMALL, holds, new_directory, parents_of, remove, slots_of, write
from tests.support.paths import REPOSITORY

PATIENCE = 60.0
ATTACH_AGAIN = 5.0
"""Seconds; a question to a store that was just killed may be lost."""


class StoreProcess:
    """Owns one `python -m kvstore` and its directory in shared memory."""

    def __init__(self, nats_url: str, node: str, *flags: str, memory: int = 2**20, inside: Sequence[str] = ()) -> None:
        self.node = NodeId(node)
        self.directory = new_directory()
        self._argv = [
            *(*inside, sys.executable, "-m", "kvstore", "--node", node, "--instance", f"kvstore-{node}"),
            *("--directory", str(self.directory), "--nats-url", nats_url, "--metrics-port", "none"),
            *("--kvstore-memory", str(memory), *flags),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(self._argv, cwd=REPOSITORY, stdout=log, stderr=log)

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> int:
        """As the supervisor ends it; the exit status."""
        assert self._process is not None
        self.signal(signal.SIGTERM)
        status = self._process.wait(timeout=PATIENCE)
        self._process = None
        return status

    def close(self) -> None:
        self.kill()
        remove(self.directory)


_lives = itertools.count(1)
"""Each client is an owner of its own, as a process that starts anew is: it numbers its leases from 1 again."""


class StoreClient:
    """Scheduler and ranks of an engine at one store. Attaches when it must."""

    def __init__(self, bus: Bus, store: StoreProcess, layout: KvLayout = SMALL) -> None:
        self._bus = bus
        self._store = store
        self._layout = layout
        self._leases = map(LeaseId, itertools.count(1))
        self.owner = LeaseOwner(InstanceId(f"engine-at-{store.node}"), Incarnation(next(_lives)))
        self.report: StoreReport | None = None
        """As its lifecycle said last."""

    async def follow(self) -> None:
        """Keeps `report` up to date from now on."""

        async def heard(message: Lifecycle) -> None:
            if message.store is not None and message.store.node == self._store.node:
                self.report = message.store

        await self._bus.subscribe(topics.lifecycles(), heard)

    async def attach(self) -> None:
        """Waits for the store to be there."""
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(NoResponders, ReplyTimeout):
                    attached = await self._ask(Attach(self._layout, MODEL), ATTACH_AGAIN)
                    break
                await asyncio.sleep(0.02)
        assert isinstance(attached, AttachReply), attached
        self.layout = attached.layout
        self.arena = MappedArena.open(self._store.directory / attached.path, attached.arena)

    async def reserve(self, names: Sequence[BlockHash]) -> tuple[LeaseId, ReserveReply]:
        lease = next(self._leases)
        reserved = await self._ask(
            Reserve(
                layout=self.layout,
                owner=self.owner,
                lease=lease,
                hashes=b"".join(names),
                parents=b"".join(parents_of(names)),
                tokens=bytes([BLOCK_SIZE]) * len(names),
            )
        )
        assert isinstance(reserved, ReserveReply), reserved
        return lease, reserved

    async def save(self, names: Sequence[BlockHash]) -> int:
        """Writes and commits what is not there; how many blocks that were."""
        lease, reserved = await self.reserve(names)
        for name, (slot, _) in zip(names, slots_of(reserved), strict=True):
            if slot != NO_SLOT:
                write(self.arena, slot, name)
        committed = await self._ask(Commit(layout=self.layout, owner=self.owner, lease=lease))
        assert isinstance(committed, CommitReply), committed
        return committed.blocks

    async def find(
        self, names: Sequence[BlockHash], *, source: StoreProcess | None = None, deadline: float = PATIENCE
    ) -> tuple[LeaseId, FindReply]:
        """Pinned under the lease; compared with what was written."""
        lease, found = await self.find_only(names, source=source, deadline=deadline)
        for name, (slot, generation) in zip(names, slots_of(found), strict=False):
            assert self.arena.generation(slot) == generation
            assert holds(self.arena, slot, name)
        return lease, found

    async def find_only(
        self, names: Sequence[BlockHash], *, source: StoreProcess | None = None, deadline: float = PATIENCE
    ) -> tuple[LeaseId, FindReply]:
        """Pinned under the lease, and not looked at."""
        lease = next(self._leases)
        found = await self._ask(
            Find(
                layout=self.layout,
                owner=self.owner,
                lease=lease,
                hashes=b"".join(names),
                deadline=deadline,
                source=None if source is None else source.node,
            )
        )
        assert isinstance(found, FindReply), found
        return lease, found

    async def found(
        self, names: Sequence[BlockHash], *, source: StoreProcess | None = None, deadline: float = PATIENCE
    ) -> tuple[int, int]:
        """How many leading blocks there are, and how many of them came from below or beside. Lets go of them."""
        lease, found = await self.find(names, source=source, deadline=deadline)
        await self.release(lease)
        return len(found.slots) // 4, found.from_lower

    async def release(self, lease: LeaseId) -> None:
        await self._bus.publish(
            topics.kvstore_releases(self._store.node), Release(layout=self.layout, owner=self.owner, lease=lease)
        )

    async def prefetch(self, names: Sequence[BlockHash], *, source: StoreProcess) -> None:
        """As an engine of `source` announces what it is about to compute."""
        await self._bus.publish(
            topics.kvstore_prefetches(self._store.node),
            Prefetch(layout=self.layout, source=source.node, hashes=b"".join(names)),
        )

    async def _ask(self, question: Any, patience: float = PATIENCE) -> Any:
        patience += getattr(question, "deadline", 0.0)
        return await self._bus.request(topics.kvstore_requests(self._store.node), question, KvStoreReply, patience)


@contextlib.asynccontextmanager
async def clients(nats_url: str, *stores: StoreProcess, layout: KvLayout = SMALL) -> AsyncIterator[list[StoreClient]]:
    """Starts the stores that do not run, and attaches to all on one bus. Those that it started are gone afterwards."""
    bus = await connect(NatsOptions(servers=(nats_url,)))
    made = [StoreClient(bus, store, layout) for store in stores]
    mine = [store for store in stores if not store.is_running]
    try:
        for store in mine:
            store.start()
        for client in made:
            await client.follow()
            await client.attach()
        yield made
    finally:
        await bus.close()
        for store in stores:
            print(store.log, file=sys.stderr)  # to explain a failed test
        for store in mine:
            store.close()


async def know_each_other(*stores: StoreClient) -> None:
    """Returns once each has said where it can be fetched from while all were there to hear it.

    Whoever is asked afterwards has heard it before the question: the bus keeps the order."""
    for store in stores:
        store.report = None
    async with asyncio.timeout(PATIENCE):
        while not all(store.report is not None and store.report.endpoints for store in stores):
            await asyncio.sleep(0.02)
