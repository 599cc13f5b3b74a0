"""A node's store without a bus: requests answered from the arenas, at once. Waits for nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, get_args

from kvstore import metrics
from kvstore.arena.directory import StoreDirectory
from kvstore.arena.in_flight_block import InFlightBlock
from kvstore.arena.mapped_arena import ArenaError
from kvstore.arena.owned_arena import OwnedArena
from kvstore.arena.shared_bandwidth import SharedBandwidth
from kvstore.core.announcer import KvAnnouncer
from kvstore.core.layout import COMMITTED, PAGE, RESERVED, UnknownDtype, fingerprint, geometry
from kvstore.core.leases import LeaseKey
from kvstore.core.slot_table import SlotTable, StoredBlock
from kvstore.core.store import BlockToWrite, RecoveredHeader, SlotRef, StoreCore
from kvstore.node.arena_writer import ArenaWriter
from kvstore.node.commit_watch import CommitWatch
from kvstore.node.packed_slots import blocks_to_write, slot_generations, slot_numbers, split_whole_hashes
from kvstore.tiers.interface import EvictionTarget
from shared.blocks import BlockHash, BlockSize, split_hashes
from shared.ids import ArenaId, Incarnation, InstanceId, LeaseId, NodeId
from shared.messages.kv_events import PrefixCacheReset
from shared.messages.kvstore import (
    Attach,
    AttachReply,
    Commit,
    CommitReply,
    Find,
    FindAny,
    FindAnyReply,
    FindReply,
    KvLayout,
    KvStoreRefusal,
    LeaseOwner,
    Release,
    Reserve,
    ReserveReply,
)
from shared.messages.lifecycle import StoreReport

log = logging.getLogger(__name__)

MAX_LAYOUTS = 16
"""The most layouts at a time. The least recently used one makes room for a new one, if no lease holds its blocks."""
MAX_BLOCKS = 65_536
"""The most blocks in one request; further ones are a miss in `Find` and get no slot in `Reserve`."""
LEND_CHECK_SECONDS = 0.02
"""Spent at the most on comparing checksums of blocks that another node fetches."""


class OpenSlot(NamedTuple):
    """A slot that a block from elsewhere is being written to."""

    key: LeaseKey
    slot: int


class NodeStore:
    """Owns the arenas of a node and all bookkeeping over them. One thread."""

    def __init__(
        self,
        directory: StoreDirectory,
        memory: int,
        lease_seconds: float,
        announced_as: tuple[InstanceId, NodeId, Incarnation],
        *,
        tier: EvictionTarget | None = None,
        bandwidth: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bandwidth`: bytes per second that all copies on the host may take together; 0: no limit. Raises OSError
        where the directory has no room."""
        self.node = announced_as[1]
        self.core = StoreCore(memory, lease_seconds)
        self.announcer = KvAnnouncer(*announced_as, self)
        self._commits = CommitWatch()
        self.bandwidth = SharedBandwidth.publish(directory.path, bandwidth)
        self._writer = ArenaWriter(self.announcer, tier, self._commits)
        self._directory = directory
        self._clock = clock
        self._attached: set[str] = set()
        self._unchecked: deque[tuple[str, StoredBlock]] = deque()
        # It writes blocks from tiers and other nodes into the arena like any writer, under leases of its own.
        self._self = LeaseOwner(announced_as[0], announced_as[2])
        self._landings = 0
        self._hits = self._lower_hits = self._misses = self._prefetched = 0

    # ---- arenas

    def recover(self) -> None:
        """Takes over what a former store left in the directory. Raises ArenaError where its file system is unfit."""
        for arena in self._directory.found():
            if arena.slots != self._slots_for(arena.layout) or arena.path.stem != fingerprint(arena.layout):
                log.info("arena of another size removed", extra={"path": str(arena.path)})
                self._directory.remove(arena)
                continue
            self._serve(arena)
            table = self.core.budget.tables[arena.path.stem]
            self._writer.carry_out(self.core.recover(table, _recovered(arena), self._clock()))
            self._unchecked.extend((table.layout, block) for block in table.blocks.values())
            log.info("arena found", extra={"path": str(arena.path), "blocks": len(table.blocks)})
        self._unchecked = deque(sorted(self._unchecked, key=lambda entry: -entry[1].used))

    def attach(self, request: Attach) -> AttachReply | KvStoreRefusal:
        """Makes an arena for the layout unless there is one, and says where it is. Refused where memory holds no
        block of it."""
        layout = fingerprint(request.layout)
        try:
            if layout not in self._writer.arenas and (refused := self._make(request.layout)) is not None:
                return refused
        except (ArenaError, UnknownDtype, OSError) as error:
            log.warning("cannot create the arena", extra={"layout": layout, "error": str(error)})
            return KvStoreRefusal(str(error))
        self._attached.add(layout)
        self.announcer.serve(layout, request.model)
        arena = self._writer.arenas[layout]
        return AttachReply(layout, arena.arena, arena.path.name, arena.slots, self.core.leases.seconds)

    def _make(self, layout: KvLayout) -> KvStoreRefusal | None:
        if min(layout.layers, layout.kv_heads, layout.head_dim, layout.value_dim or 1) < 1:
            return KvStoreRefusal("a layout without layers, heads or numbers")
        if layout.block_size not in (sizes := get_args(BlockSize)):
            return KvStoreRefusal(f"blocks of {layout.block_size} tokens; {', '.join(map(str, sizes))} are known")
        slots = self._slots_for(layout)
        if slots < 1:
            return KvStoreRefusal(f"{self.core.budget.total} bytes hold no block of this layout")
        if len(self._writer.arenas) >= MAX_LAYOUTS:
            unused = self.core.least_used()
            if unused is None:
                return KvStoreRefusal(f"{MAX_LAYOUTS} layouts are in use")
            self._forget(unused)
        self._serve(self._directory.create(layout, slots))
        return None

    def _serve(self, arena: OwnedArena) -> None:
        shape, layout = arena.geometry, fingerprint(arena.layout)
        self._writer.arenas[layout] = arena
        size = arena.layout.block_size
        self.core.add(SlotTable(layout, arena.slots, shape.payload_stride, shape.payloads_at, size))

    def _forget(self, layout: str) -> None:
        log.info("arena removed to make room", extra={"layout": layout})
        self.announcer.forget(layout)
        self.core.remove(layout)
        self._attached.discard(layout)
        self._directory.remove(self._writer.arenas.pop(layout))

    def _slots_for(self, layout: KvLayout) -> int:
        """The number of slots that fit into the whole budget. All layouts share the budget, and the files are
        sparse."""
        one = geometry(layout, 1)
        slots = max(0, self.core.budget.total - PAGE) // (one.payload_stride + one.header_stride)
        while slots and geometry(layout, slots).file_bytes > self.core.budget.total:
            slots -= 1
        return slots

    # ---- requests

    def find(self, request: Find) -> FindReply | KvStoreRefusal:
        """What the arena has; `land` and another `find` under the same lease add what tiers have."""
        if request.layout not in self._attached:
            return _unknown(request.layout)
        key = LeaseKey(request.layout, request.owner, request.lease)
        hashes = split_whole_hashes(request.hashes)[:MAX_BLOCKS]
        now = self._clock()
        # Half of the time at the most: what is not looked at by then is a miss this time.
        self._check(request.layout, self.core.unchecked(request.layout, hashes), now + request.deadline / 2)
        slots, actions = (self.core.keep if request.keep else self.core.find)(key, hashes, now)
        self._writer.carry_out(actions)
        return FindReply(
            arena=self._arena(request.layout), slots=slot_numbers(slots), generations=slot_generations(slots)
        )

    def find_any(self, request: FindAny) -> FindAnyReply | KvStoreRefusal:
        """Which of the blocks the arena has; none of them is pinned."""
        table = self.core.table(request.layout)
        if table is None or request.layout not in self._attached:
            return _unknown(request.layout)
        names = split_whole_hashes(request.hashes)[:MAX_BLOCKS]
        return FindAnyReply(bytes(table.find(name) is not None for name in names))

    def count(self, hits: int, lower_hits: int, misses: int) -> None:
        """Counts the blocks of one search that is over: found in all, found in lower tiers, and not found."""
        self._hits += hits
        self._lower_hits += lower_hits
        self._misses += misses
        metrics.HITS.labels("arena").inc(hits - lower_hits)
        metrics.HITS.labels("lower").inc(lower_hits)
        metrics.MISSES.inc(misses)

    def count_prefetched(self, blocks: int) -> None:
        """Counts blocks that another node sent while it computed their prompt."""
        self._prefetched += blocks
        metrics.PREFETCHED.inc(blocks)

    def reserve(self, request: Reserve) -> ReserveReply | KvStoreRefusal:
        """Slots to write blocks to, pinned under the lease. A block that is here already or finds no room gets none."""
        if request.layout not in self._attached:
            return _unknown(request.layout)
        key = LeaseKey(request.layout, request.owner, request.lease)
        wanted = blocks_to_write(request, self.core.budget.tables[request.layout].block_size)
        if wanted is None:
            return KvStoreRefusal("hashes, parents and tokens do not fit together")
        slots = self._reserve(key, wanted[:MAX_BLOCKS])
        slots += [None] * (len(wanted) - len(slots))
        return ReserveReply(
            arena=self._arena(request.layout), slots=slot_numbers(slots), generations=slot_generations(slots)
        )

    def _reserve(self, key: LeaseKey, wanted: Sequence[BlockToWrite]) -> list[SlotRef | None]:
        table = self.core.budget.tables[key.layout]
        absent = sum(each.hash not in table.blocks for each in wanted)
        slots, without = self._reserve_slots(key, wanted)
        if without:
            log.warning("shared memory is full", extra={"taken": self.core.budget.memory})
            # The core knows now that there is no more memory: other blocks must be evicted for these.
            again, _ = self._reserve_slots(key, [wanted[at] for at in without])
            for at, slot in zip(without, again, strict=True):
                slots[at] = slot
        metrics.REFUSED.inc(absent - sum(slot is not None for slot in slots))
        return slots

    def _reserve_slots(self, key: LeaseKey, wanted: Sequence[BlockToWrite]) -> tuple[list[SlotRef | None], list[int]]:
        """The slots, and the places in `wanted` of those that got none because the system had no memory."""
        now = self._clock()
        slots, actions = self.core.reserve(key, wanted, now)
        refused = self._writer.carry_out(actions)
        without = [at for at, slot in enumerate(slots) if slot is not None and slot.number in refused]
        for at in without:
            slot, slots[at] = slots[at], None
            assert slot is not None
            self._writer.carry_out(self.core.no_memory(key, slot.number, now))
        return slots, without

    def commit(self, request: Commit) -> CommitReply | KvStoreRefusal:
        """Ends the lease; those of its blocks of which every cell was written can be found from now on."""
        if request.layout not in self._attached:
            return _unknown(request.layout)
        return CommitReply(self._commit(LeaseKey(request.layout, request.owner, request.lease), "engine"))

    def _commit(self, key: LeaseKey, source: str) -> int:
        arena = self._writer.arenas[key.layout]
        written = self.core.reserved_slots(key)
        whole = {slot for slot in written if arena.is_written(slot)}
        blocks, actions = self.core.commit(key, whole, self._clock())
        self._writer.carry_out(actions)
        metrics.STORED.labels(source).inc(blocks)
        metrics.UNWRITTEN.inc(len(written) - len(whole))
        return blocks

    def release(self, message: Release) -> None:
        """Ends the lease and takes its pins off. A lease that has ended before is no error."""
        key = LeaseKey(message.layout, message.owner, message.lease)
        self._writer.carry_out(self.core.release(key, self._clock(), frozenset(split_hashes(message.drop))))

    def reset(self) -> PrefixCacheReset:
        """Drops every block; what lies in lower tiers stays there."""
        blocks, actions = self.core.forget()
        self._writer.carry_out(actions)
        log.info("blocks dropped", extra={"blocks": blocks})
        return PrefixCacheReset(blocks)

    def owner_gone(self, owner: LeaseOwner) -> None:
        """Ends every lease of a process that has ended; slots that it was writing to rest."""
        self._writer.carry_out(self.core.owner_gone(owner, self._clock()))

    def time_passed(self) -> None:
        """Ends leases that have run out, and rests that are over. Called every half second."""
        self._writer.carry_out(self.core.time_passed(self._clock()))

    # ---- memory ahead of its use

    def prepare(self, layout: str) -> int | None:
        """A slot whose memory should be taken in the background; call `prepared` with the outcome."""
        table = self.core.table(layout)
        return None if table is None else self.core.budget.prepare(table)

    def prepared(self, arena: OwnedArena, slot: int, taken: bool) -> None:
        """The memory of a slot from `prepare` was taken, or was not to be had. Ignored where the arena was replaced
        meanwhile."""
        layout = arena.path.stem
        if self._writer.arenas.get(layout) is arena:
            self.core.budget.finish_preparing(self.core.budget.tables[layout], slot, taken, self._clock())

    # ---- tiers and other nodes

    def arena_of(self, layout: str) -> OwnedArena | None:
        """The mapped arena of a layout; None where it is not attached."""
        return self._writer.arenas.get(layout)

    def missing(self, layout: str, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """The hashes behind the leading run that is here."""
        table = self.core.table(layout)
        return hashes if table is None else hashes[len(table.leading_run(hashes)) :]

    def land(self, layout: str, block: InFlightBlock) -> bool:
        """Takes a checked block from elsewhere into the arena; False where it finds no room. True, too, where it is
        here already or being written."""
        table = self.core.table(layout)
        if table is None or self.is_known(layout, block.hash):
            return table is not None
        opened = self.open_slot(layout, BlockToWrite(block.hash, BlockHash(block.parent), block.tokens))
        if opened is None:
            return False
        self._writer.arenas[layout].fill(opened.slot, block)
        return self.commit_slot(opened.key)

    def is_known(self, layout: str, name: BlockHash) -> bool:
        """Whether the block is here, or being written."""
        table = self.core.table(layout)
        return table is not None and name in table.blocks

    def open_slot(self, layout: str, block: BlockToWrite) -> OpenSlot | None:
        """Reserves a slot for a block from elsewhere, for as long as a lease lasts; None where it finds no room, is
        known already, or has more tokens than blocks have. Ended by `commit_slot` or `give_up_slot`."""
        table = self.core.table(layout)
        if table is None or not 0 < block.tokens <= table.block_size:
            return None
        self._landings += 1
        key = LeaseKey(layout, self._self, LeaseId(self._landings))
        [slot] = self._reserve(key, [block])
        return None if slot is None else OpenSlot(key, slot.number)

    def has_lease(self, key: LeaseKey) -> bool:
        """Whether the slot is still this writer's."""
        return self.core.leases.get(key) is not None

    def commit_slot(self, key: LeaseKey) -> bool:
        """The block is written, with its checksums; False where its lease had ended before."""
        return bool(self._commit(key, "lower"))

    def give_up_slot(self, key: LeaseKey) -> None:
        """Nothing writes to the slot any more, and there is no block in it. A lease that has ended is no error."""
        self._writer.carry_out(self.core.release(key, self._clock()))

    def lend(
        self, layout: str, hashes: Sequence[BlockHash]
    ) -> contextlib.AbstractContextManager[Sequence[InFlightBlock]] | None:
        """Lends blocks to another node's store; see `kvstore.transfer.interface.BlockLender`."""
        return self._lent(layout, hashes) if layout in self._writer.arenas else None

    @contextlib.contextmanager
    def _lent(self, layout: str, hashes: Sequence[BlockHash]) -> Iterator[Sequence[InFlightBlock]]:
        table = self.core.budget.tables[layout]
        self._check(layout, self.core.unchecked(layout, hashes), self._clock() + LEND_CHECK_SECONDS)
        run = table.checked_run(hashes)
        self.core.pin(table, run)
        try:
            yield [self._writer.arenas[layout].in_flight(block.slot) for block in run]
        finally:
            self._writer.carry_out(self.core.unpin(table, run))

    async def copying(self, size: int) -> None:
        """Returns when so many bytes may be copied; see `BlockLender.copying`."""
        wait = self.bandwidth.take(size)
        if wait > 0.0:
            metrics.COPY_WAITS.inc(wait)
            await asyncio.sleep(wait)

    async def committed(self, layout: str, name: BlockHash, seconds: float) -> bool:
        """Waits until a block is committed; see `BlockLender.committed`."""
        return await self._commits.wait(layout, name, seconds)

    # ---- checksums

    def check_some(self, seconds: float) -> bool:
        """Compares blocks that a former store left with their checksums, those used last first. True while some are
        left."""
        until = self._clock() + seconds
        while self._unchecked and self._clock() < until:
            layout, block = self._unchecked.popleft()
            table = self.core.table(layout)
            if table is not None and table.blocks.get(block.hash) is block and not block.checked:
                self._check(layout, [block], until)
        metrics.UNCHECKED.set(len(self._unchecked))
        return bool(self._unchecked)

    def _check(self, layout: str, blocks: Iterable[StoredBlock], until: float) -> None:
        """Stops at the first that is not sound: what follows is not reached by this chain any more."""
        for block in blocks:
            if self._clock() >= until:
                return
            sound = self._writer.arenas[layout].is_sound(block.slot)
            self._writer.carry_out(self.core.checked(layout, block, sound))
            if not sound:
                metrics.SPOILED.inc()
                log.warning("block with a wrong checksum dropped", extra={"layout": layout, "hash": block.hash.hex()})
                return

    # ---- what there is

    def held(self, layout: str) -> Iterable[BlockHash]:
        """For the announcer: full blocks that are committed."""
        table = self.core.budget.tables[layout]
        return [block.hash for block in table.blocks.values() if _counts(block, table)]

    def holds(self, layout: str, name: BlockHash) -> bool:
        """For the announcer: whether this block is full and committed."""
        table = self.core.budget.tables[layout]
        block = table.blocks.get(name)
        return block is not None and _counts(block, table)

    def report(self) -> StoreReport:
        """Slots, bytes and hits over all layouts."""
        tables = self.core.budget.tables.values()
        return StoreReport(
            node=self.node,
            slots=sum(table.slots for table in tables),
            committed=sum(table.committed for table in tables),
            reserved=sum(table.reserved for table in tables),
            pinned=sum(table.pinned for table in tables),
            bytes_used=sum((table.committed + table.reserved) * table.block_bytes for table in tables),
            bytes_total=self.core.budget.total,
            hits=self._hits,
            misses=self._misses,
            lower_hits=self._lower_hits,
            prefetched=self._prefetched,
        )

    def close(self) -> None:
        """Gives the directory's lock up. Files stay for the store that comes after."""
        for arena in self._writer.arenas.values():
            arena.close()
        self._directory.close()

    def _arena(self, layout: str) -> ArenaId:
        return self._writer.arenas[layout].arena


def _counts(block: StoredBlock, table: SlotTable) -> bool:
    return block.committed and block.tokens == table.block_size


def _unknown(layout: str) -> KvStoreRefusal:
    return KvStoreRefusal(f"layout {layout} is not attached")


def _recovered(arena: OwnedArena) -> Iterator[RecoveredHeader]:
    for slot, header in arena.headers():
        committed, reserved = header.state == COMMITTED, header.state == RESERVED
        names = header.hash, header.parent
        yield RecoveredHeader(slot, header.generation, committed, reserved, *names, header.tokens, header.used)
