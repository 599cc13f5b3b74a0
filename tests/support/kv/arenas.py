"""KV stores over real arenas in shared memory, and ranks that write and read blocks whose contents tell their names."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from kvstore.arena.directory import StoreDirectory
from kvstore.arena.in_flight_block import NO_PARENT
from kvstore.arena.mapped_arena import MappedArena
from kvstore.node.node_store import NodeStore
from kvstore.tiers.interface import LowerTier
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.blocks import BlockHash, split_hashes
from shared.ids import Incarnation, InstanceId, LeaseId, ModelName, NodeId
from shared.messages.kvstore import (
    Attach,
    AttachReply,
    Commit,
    CommitReply,
    Find,
    FindReply,
    KvLayout,
    LeaseOwner,
    Release,
    Reserve,
    ReserveReply,
)
from shared.packing import unpack, unpack_generations

NODE = NodeId("node-1")
STORE = InstanceId("kvstore-1")
SMALL = KvLayout(model="small", dtype="float16", layers=1, kv_heads=2, head_dim=8)
"""One page a block."""
LARGE = KvLayout(model="large", dtype="float32", layers=2, kv_heads=3, head_dim=8)
"""Two pages a block."""
MODEL = ModelName("a-model")
SHARED_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


class Clock:
    """Does not advance by itself."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def new_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="baton-test-", dir=SHARED_MEMORY))


def remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


def store_in(
    directory: Path,
    memory: int,
    clock: Clock,
    *,
    lease_seconds: float = 10.0,
    tier: LowerTier | None = None,
    life: int = 1,
) -> NodeStore:
    store = NodeStore(
        StoreDirectory(directory), memory, lease_seconds, (STORE, NODE, Incarnation(life)), tier=tier, clock=clock
    )
    store.recover()
    return store


def name_of(label: object) -> BlockHash:
    return BlockHash(blake2b(repr(label).encode(), digest_size=16).digest())


def chain(label: object, length: int) -> list[BlockHash]:
    return [name_of((label, at)) for at in range(length)]


def contents(name: bytes, cell: int, size: int) -> bytes:
    """What a rank writes for a cell of a block: no two have the same."""
    return (blake2b(name + bytes([cell]), digest_size=64).digest() * (size // 64 + 1))[:size]


def write_cell(arena: MappedArena, slot: int, name: bytes, cell: int) -> None:
    arena.cells(slot, cell, 1)[:] = contents(name, cell, arena.geometry.cell_bytes)
    arena.write_checksum(slot, cell)


def write(arena: MappedArena, slot: int, name: bytes) -> None:
    for cell in range(arena.geometry.cells):
        write_cell(arena, slot, name, cell)


def holds(arena: MappedArena, slot: int, name: bytes) -> bool:
    """Whether the slot's contents are this block's."""
    size = arena.geometry.cell_bytes
    return all(arena.cells(slot, cell, 1) == contents(name, cell, size) for cell in range(arena.geometry.cells))


def parents_of(hashes: Sequence[BlockHash], before: bytes = NO_PARENT) -> list[bytes]:
    return [before, *hashes[:-1]][: len(hashes)]


def slots_of(answer: FindReply | ReserveReply) -> list[tuple[int, int]]:
    """(slot, generation)."""
    return list(zip(unpack(answer.slots), unpack_generations(answer.generations), strict=True))


class Client:
    """An engine's side of the protocol, scheduler and ranks together, against a store in the same process."""

    def __init__(
        self, store: NodeStore, layout: KvLayout = SMALL, *, instance: str = "engine-1", life: int = 1
    ) -> None:
        self.store = store
        self.owner = LeaseOwner(InstanceId(instance), Incarnation(life))
        attached = store.attach(Attach(layout, MODEL))
        assert isinstance(attached, AttachReply), attached
        self.attached = attached
        self.layout = attached.layout
        self.leases: Iterator[LeaseId] = map(LeaseId, itertools.count(1))
        served = store.arena_of(self.layout)
        assert served is not None
        # A mapping of its own, as ranks have.
        self.arena = MappedArena.open(served.path.with_name(attached.path), attached.arena)

    def reserve(
        self,
        hashes: Sequence[BlockHash],
        *,
        parents: Sequence[bytes] | None = None,
        tokens: int = BLOCK_SIZE,
        lease: LeaseId | None = None,
    ) -> tuple[LeaseId, ReserveReply]:
        lease = lease or next(self.leases)
        answer = self.store.reserve(
            Reserve(
                layout=self.layout,
                owner=self.owner,
                lease=lease,
                hashes=b"".join(hashes),
                parents=b"".join(parents if parents is not None else parents_of(hashes)),
                tokens=bytes([tokens] * len(hashes)),
            )
        )
        assert isinstance(answer, ReserveReply), answer
        return lease, answer

    def commit(self, lease: LeaseId) -> int:
        answer = self.store.commit(Commit(layout=self.layout, owner=self.owner, lease=lease))
        assert isinstance(answer, CommitReply), answer
        return answer.blocks

    def save(self, hashes: Sequence[BlockHash], *, parents: Sequence[bytes] | None = None) -> int:
        """Reserves, writes and commits what is not there; how many blocks that were."""
        lease, reserved = self.reserve(hashes, parents=parents)
        for name, (slot, _) in zip(hashes, slots_of(reserved), strict=True):
            if slot < self.arena.slots:
                write(self.arena, slot, name)
        return self.commit(lease)

    def find(self, hashes: Sequence[BlockHash], *, deadline: float = 0.01) -> tuple[LeaseId, FindReply]:
        lease = next(self.leases)
        answer = self.store.find(
            Find(layout=self.layout, owner=self.owner, lease=lease, hashes=b"".join(hashes), deadline=deadline)
        )
        assert isinstance(answer, FindReply), answer
        return lease, answer

    def found(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading blocks are there. Reads them, and lets go."""
        lease, found = self.find(hashes)
        slots = slots_of(found)
        for name, (slot, generation) in zip(hashes, slots, strict=False):
            assert self.arena.generation(slot) == generation
            assert holds(self.arena, slot, name)
        self.release(lease)
        return len(slots)

    def release(self, lease: LeaseId, drop: Sequence[BlockHash] = ()) -> None:
        self.store.release(Release(layout=self.layout, owner=self.owner, lease=lease, drop=b"".join(drop)))


def names_in(packed: bytes) -> list[BlockHash]:
    return list(split_hashes(packed))
