"""Engines that write and read blocks of one arena as fast as they can, to be killed at any moment. Run as a program.

`python -m tests.support.kv.hammer NATS_URL NODE DIRECTORY` reads lines `INSTANCE LIFE SEED` and forks an engine for
each, so
that one is there in milliseconds. Answers with lines `PID EVENT NUMBER`, see `Event`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from kvstore.arena.mapped_arena import ArenaError, MappedArena
from shared import topics
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.blocks import BlockHash
from shared.bus import Bus, BusError
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
    Release,
    Reserve,
    ReserveReply,
)
from shared.messages.lifecycle import Lifecycle
from tests.support.kv.arenas import MODEL, chain, contents, holds, parents_of, slots_of

LAYOUT = KvLayout(model="hammered", dtype="float32", layers=4, kv_heads=4, head_dim=16)
"""128 kB a block: long enough to be killed in."""
CHAINS = [chain(("hammered", number), 8) for number in range(5)]
PARENT = {name: parent for names in CHAINS for name, parent in zip(names, parents_of(names), strict=True)}

Event = Literal["born", "wrote", "read", "late", "torn", "absent"]
"""born: engine number so. wrote, read: so many blocks. late: a lease had ended. torn: a slot that was not what it said.
absent: no store."""


class Engine:
    """One engine, scheduler and ranks together, that misbehaves now and then."""

    def __init__(self, bus: Bus, node: NodeId, directory: Path, owner: LeaseOwner, chance: random.Random) -> None:
        self._bus = bus
        self._node = node
        self._directory = directory
        self._owner = owner
        self._chance = chance
        self._leases = 0
        self._arena: MappedArena | None = None
        self._layout = ""

    async def run(self) -> None:
        await self._bus.publish(topics.lifecycle_of("scheduler", self._owner.instance), life_of(self._owner))
        tell("born", int(self._owner.instance.rpartition("-")[2]))
        while True:
            try:
                await self._chance.choice((self._write, self._read, self._read))()
            except (BusError, ArenaError):
                tell("absent", 1)
                await asyncio.sleep(0.02)
                await self._attach()

    async def _attach(self) -> None:
        with contextlib.suppress(BusError, ArenaError):
            attached = await self._ask(Attach(LAYOUT, MODEL))
            assert isinstance(attached, AttachReply), attached
            self._layout = attached.layout
            self._arena = MappedArena.open(self._directory / attached.path, attached.arena)

    def _mapped(self) -> MappedArena:
        if self._arena is None:
            raise ArenaError("not attached yet")
        return self._arena

    async def _write(self) -> None:
        names = self._some_run()
        lease, arena = self._lease(), self._mapped()
        reserved = await self._ask(
            Reserve(
                layout=self._layout,
                owner=self._owner,
                lease=lease,
                hashes=b"".join(names),
                parents=b"".join(PARENT[name] for name in names),
                tokens=bytes([BLOCK_SIZE]) * len(names),
            )
        )
        if not isinstance(reserved, ReserveReply):
            return self._unknown()
        for name, (slot, generation) in zip(names, slots_of(reserved), strict=True):
            if slot != NO_SLOT and not await self._fill(arena, slot, generation, name):
                tell("late", 1)
        if self._chance.random() < 0.1:
            return  # forgotten: this lease is never ended
        committed = await self._ask(Commit(layout=self._layout, owner=self._owner, lease=lease))
        if isinstance(committed, CommitReply) and committed.blocks:
            tell("wrote", committed.blocks)

    async def _fill(self, arena: MappedArena, slot: int, generation: int, name: BlockHash) -> bool:
        """As a rank does: looks before each head whether the slot is still its own."""
        for head in range(arena.geometry.cells):
            if self._chance.random() < 0.02:
                return True  # a rank that died: this head stays unwritten
            if self._chance.random() < 0.2:
                await asyncio.sleep(0)
            if arena.generation(slot) != generation:
                return False
            arena.cells(slot, head, 1)[:] = contents(name, head, arena.geometry.cell_bytes)
            if arena.generation(slot) != generation:
                return False
            arena.write_checksum(slot, head)
        return True

    async def _read(self) -> None:
        names = self._some_run()
        lease, arena = self._lease(), self._mapped()
        found = await self._ask(
            Find(layout=self._layout, owner=self._owner, lease=lease, hashes=b"".join(names), deadline=0.5)
        )
        if not isinstance(found, FindReply):
            return self._unknown()
        for name, (slot, generation) in zip(names, slots_of(found), strict=False):
            before = arena.generation(slot)
            whole = holds(arena, slot, name)
            if before == arena.generation(slot) == generation:
                tell("read" if whole else "torn", 1)
            else:
                tell("late", 1)
        if self._chance.random() < 0.9:
            release = Release(layout=self._layout, owner=self._owner, lease=lease)
            await self._bus.publish(topics.kvstore_releases(self._node), release)

    def _unknown(self) -> None:
        """The store was restarted and needs the layout again."""
        raise ArenaError("not attached")

    def _some_run(self) -> Sequence[BlockHash]:
        names = self._chance.choice(CHAINS)
        return names[: self._chance.randint(1, len(names))]

    def _lease(self) -> LeaseId:
        self._leases += 1
        return LeaseId(self._leases)

    async def _ask(self, question: Any) -> Any:
        return await self._bus.request(topics.kvstore_requests(self._node), question, KvStoreReply, 2.0)


def life_of(owner: LeaseOwner, phase: Literal["ready", "failed"] = "ready") -> Lifecycle:
    return Lifecycle(
        service="scheduler",
        instance=owner.instance,
        incarnation=owner.incarnation,
        phase=phase,
        pid=os.getpid(),
        host="here",
        started=0.0,
    )


def tell(event: Event, number: int) -> None:
    """One write, so that lines of several engines never mix."""
    os.write(1, f"{os.getpid()} {event} {number}\n".encode())


async def hammer(nats_url: str, node: str, directory: str, instance: str, life: str, seed: str) -> None:
    bus = await connect(NatsOptions(servers=(nats_url,)))
    owner = LeaseOwner(InstanceId(instance), Incarnation(int(life)))
    await Engine(bus, NodeId(node), Path(directory), owner, random.Random(seed)).run()


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.setpgid(0, 0)
    while line := os.read(0, 200):
        for words in line.decode().splitlines():
            if os.fork() == 0:
                asyncio.run(hammer(*sys.argv[1:4], *words.split()))
    os.killpg(0, signal.SIGKILL)  # the parent is gone, or done: so are all engines


if __name__ == "__main__":
    main()
