"""A node's KV store on virtual time: the store's real core, without arenas; and copies to and from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvstore.core.actions import Action, CommitSlot, DropBlock, EvictBlock
from kvstore.core.announcer import KvAnnouncer
from kvstore.core.layout import fingerprint
from kvstore.core.leases import LeaseKey
from kvstore.core.slot_table import SlotTable, StoredBlock
from kvstore.core.store import StoreCore
from kvstore.node.packed_slots import blocks_to_write, slot_generations, slot_numbers, split_whole_hashes
from services.worker.kv.copy_thread import around
from shared.blocks import BlockHash, split_hashes
from shared.ids import ArenaId, Incarnation, InstanceId, NodeId
from shared.messages.kv_events import KvEvents
from shared.messages.kvstore import (
    Attach,
    AttachReply,
    Commit,
    CommitReply,
    Find,
    FindAny,
    FindAnyReply,
    FindReply,
    KvStoreReply,
    KvStoreRequest,
    Release,
    Reserve,
    ReserveReply,
)
from shared.messages.lifecycle import Lifecycle, StoreReport
from shared.messages.worker import StepPlan, Transfer
from shared.packing import count

NODE = NodeId("node-1")
STORE = InstanceId("kvstore-1")
INCARNATION = Incarnation(1)
ARENA = ArenaId(1)
LEASE_SECONDS = 10.0
CHECK_SECONDS = 0.5


class SimulatedStore:
    """Owns the blocks of one node's store. All engines of a simulation are on its node."""

    def __init__(self, memory: int, block_bytes: int) -> None:
        """`memory`: bytes for blocks of `block_bytes` each."""
        self._core = StoreCore(memory, LEASE_SECONDS)
        self._announcer = KvAnnouncer(STORE, NODE, INCARNATION, self)
        self._slots = memory // block_bytes
        self._block_bytes = block_bytes
        self._checked_at = 0.0

    def answer(self, request: KvStoreRequest, now: float) -> KvStoreReply:
        """The reply to a request that comes at `now`, which is no earlier than those before."""
        self._check(now)
        match request:
            case Attach():
                return self._attach(request)
            case Find():
                return self._find(request, now)
            case FindAny():
                table = self._core.table(request.layout)
                names = split_whole_hashes(request.hashes)
                return FindAnyReply(bytes(table is not None and table.find(name) is not None for name in names))
            case Reserve():
                return self._reserve(request, now)
            case Commit():
                key = LeaseKey(request.layout, request.owner, request.lease)
                # Every block was written: a rank's copies do not fail here.
                written, actions = self._core.commit(key, self._core.reserved_slots(key), now)
                self._announce(actions)
                return CommitReply(written)

    def release(self, release: Release, now: float) -> None:
        """Ends a lease."""
        self._check(now)
        key = LeaseKey(release.layout, release.owner, release.lease)
        self._announce(self._core.release(key, now, frozenset(split_hashes(release.drop))))

    @property
    def changed(self) -> bool:
        """Whether coordinators are to hear anything new of it."""
        return self._announcer.pending

    def take_events(self) -> list[KvEvents]:
        """What coordinators are to hear of it, since the last call."""
        return self._announcer.flush()

    def lifecycle(self) -> Lifecycle:
        """Its first heartbeat; the others would say nothing new that decides anything."""
        report = StoreReport(
            node=NODE,
            slots=self._slots,
            committed=0,
            reserved=0,
            pinned=0,
            bytes_used=0,
            bytes_total=self._slots * self._block_bytes,
            hits=0,
            misses=0,
        )
        return Lifecycle(
            service="kvstore",
            instance=STORE,
            incarnation=INCARNATION,
            phase="ready",
            pid=0,
            host="simulated",
            started=0.0,
            store=report,
        )

    # ---- for the announcer

    def held(self, layout: str) -> list[BlockHash]:
        """As `CommittedBlocks` has it."""
        table = self._core.table(layout)
        return [] if table is None else [block.hash for block in table.blocks.values() if _counts(block, table)]

    def holds(self, layout: str, name: BlockHash) -> bool:
        """As `CommittedBlocks` has it."""
        table = self._core.table(layout)
        block = None if table is None else table.blocks.get(name)
        return table is not None and block is not None and _counts(block, table)

    # ---- requests

    def _attach(self, request: Attach) -> AttachReply:
        layout = fingerprint(request.layout)
        if self._core.table(layout) is None:
            self._core.add(SlotTable(layout, self._slots, self._block_bytes, 0, request.layout.block_size))
        self._announcer.serve(layout, request.model)
        return AttachReply(layout, ARENA, "simulated", self._slots, LEASE_SECONDS)

    def _find(self, request: Find, now: float) -> FindReply:
        key = LeaseKey(request.layout, request.owner, request.lease)
        hashes = split_whole_hashes(request.hashes)
        slots, actions = self._core.find(key, hashes, now)
        self._announce(actions)
        return FindReply(arena=ARENA, slots=slot_numbers(slots), generations=slot_generations(slots))

    def _reserve(self, request: Reserve, now: float) -> ReserveReply:
        table = self._core.table(request.layout)
        wanted = None if table is None else blocks_to_write(request, table.block_size)
        assert wanted is not None, "a scheduler's requests fit together"
        slots, actions = self._core.reserve(LeaseKey(request.layout, request.owner, request.lease), wanted, now)
        self._announce(actions)
        return ReserveReply(arena=ARENA, slots=slot_numbers(slots), generations=slot_generations(slots))

    def _check(self, now: float) -> None:
        if now - self._checked_at >= CHECK_SECONDS:
            self._checked_at = now
            self._announce(self._core.time_passed(now))

    def _announce(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case CommitSlot():
                    self._announcer.stored(action.layout, action.hash, full=self._is_full(action))
                case DropBlock() | EvictBlock():
                    self._announcer.gone(action.layout, action.hash, full=self._is_full(action))
                case _:
                    pass

    def _is_full(self, action: CommitSlot | DropBlock | EvictBlock) -> bool:
        table = self._core.table(action.layout)
        return table is not None and action.tokens == table.block_size


class EndingTransfer(NamedTuple):
    """A transfer of an engine's epoch, and when all ranks have copied it."""

    number: int
    ends: float


class VirtualCopies:
    """Owns the time until which an engine's copy threads are busy. All ranks copy alike, at the same time."""

    def __init__(self, seconds_per_block: float) -> None:
        self._seconds_per_block = seconds_per_block
        self._busy_until = 0.0

    def add(self, plan: StepPlan, begins: float, ends: float) -> Iterator[EndingTransfer]:
        """The transfers of a plan that the device computes from `begins` to `ends`, as the copy thread orders them:
        loads first, then saves behind the step."""
        before, after = around(plan.transfers)
        for transfers, at in ((before, begins), (after, ends)):
            for transfer in transfers:
                yield self._end(transfer, at)

    def _end(self, transfer: Transfer, at: float) -> EndingTransfer:
        seconds = count(transfer.blocks) * self._seconds_per_block
        self._busy_until = max(self._busy_until, at) + seconds
        return EndingTransfer(transfer.number, self._busy_until)


def _counts(block: StoredBlock, table: SlotTable) -> bool:
    return block.committed and block.tokens == table.block_size
