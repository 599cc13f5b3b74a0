"""A node's store without a bus: questions answered from the arenas, at once. Waits for nothing."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstore import metrics
from kvstore.announcer import Announcer
from kvstore.arena import ArenaError
from kvstore.arena_writer import ArenaWriter
from kvstore.carried import CarriedBlock
from kvstore.core.layout import COMMITTED, PAGE, RESERVED, UnknownDtype, fingerprint, geometry
from kvstore.core.leases import LeaseKey
from kvstore.core.shelf import Block, Shelf
from kvstore.core.store import Recovered, Slot, Store, Wanted, checked_run
from kvstore.directory import StoreDirectory
from kvstore.owned_arena import OwnedArena
from kvstore.packed import generations, numbers, wanted_by, whole_hashes
from kvstore.tiers import Tier
from shared.blocks import BLOCK_SIZE, BlockHash, split_hashes
from shared.ids import ArenaId, Incarnation, InstanceId, LeaseId, NodeId
from shared.messages.kvstore import (
    Attach,
    Attached,
    Commit,
    Committed,
    Find,
    Found,
    KvLayout,
    NotServed,
    Owner,
    Release,
    Reserve,
    Reserved,
)
from shared.messages.lifecycle import StoreReport

log = logging.getLogger(__name__)

MAX_LAYOUTS = 16
"""At a time. The one that was not used for longest goes for a new one, if nobody holds anything of it."""
MAX_BLOCKS = 65_536
"""In one question; what is asked for beyond is a miss, what is to be stored finds no room."""
LEND_CHECK_SECONDS = 0.02
"""For checksums of blocks that another node asks for."""


class NodeStore:
    """Owns the arenas of a node and all bookkeeping over them. One thread."""

    def __init__(
        self,
        directory: StoreDirectory,
        memory: int,
        lease_seconds: float,
        announced_as: tuple[InstanceId, NodeId, Incarnation],
        *,
        tier: Tier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node = announced_as[1]
        self.core = Store(memory, lease_seconds)
        self.announcer = Announcer(*announced_as, self)
        self._writer = ArenaWriter(self.announcer, tier)
        self._directory = directory
        self._clock = clock
        self._attached: set[str] = set()
        self._unchecked: deque[tuple[str, Block]] = deque()
        # It lands what comes from tiers and other nodes like any writer, under leases of its own.
        self._self = Owner(announced_as[0], announced_as[2])
        self._landings = 0
        self._hits = self._lower_hits = self._misses = 0

    # ---- arenas

    def recover(self) -> None:
        """Takes over what a former store left in the directory. Raises ArenaError where its file system is unfit."""
        for arena in self._directory.found():
            if arena.slots != self._slots_for(arena.layout) or arena.path.stem != fingerprint(arena.layout):
                log.info("arena of another size removed", extra={"path": str(arena.path)})
                self._directory.remove(arena)
                continue
            self._serve(arena)
            shelf = self.core.room.shelves[arena.path.stem]
            self._writer.carry_out(self.core.recover(shelf, _recovered(arena), self._clock()))
            self._unchecked.extend((shelf.layout, block) for block in shelf.blocks.values())
            log.info("arena found", extra={"path": str(arena.path), "blocks": len(shelf.blocks)})
        self._unchecked = deque(sorted(self._unchecked, key=lambda entry: -entry[1].used))

    def attach(self, question: Attach) -> Attached | NotServed:
        layout = fingerprint(question.layout)
        try:
            if layout not in self._writer.arenas and (refused := self._make(question.layout)) is not None:
                return refused
        except (ArenaError, UnknownDtype, OSError) as error:
            log.warning("no arena", extra={"layout": layout, "error": str(error)})
            return NotServed(str(error))
        self._attached.add(layout)
        self.announcer.serve(layout, question.model)
        arena = self._writer.arenas[layout]
        return Attached(layout, arena.arena, arena.path.name, arena.slots, self.core.leases.seconds)

    def _make(self, layout: KvLayout) -> NotServed | None:
        if min(layout.layers, layout.kv_heads, layout.head_dim) < 1:
            return NotServed("a layout without layers, heads or numbers")
        slots = self._slots_for(layout)
        if slots < 1:
            return NotServed(f"{self.core.room.budget} bytes hold no block of this layout")
        if len(self._writer.arenas) >= MAX_LAYOUTS:
            unused = self.core.least_used()
            if unused is None:
                return NotServed(f"{MAX_LAYOUTS} layouts are in use")
            self._forget(unused)
        self._serve(self._directory.create(layout, slots))
        return None

    def _serve(self, arena: OwnedArena) -> None:
        shape, layout = arena.geometry, fingerprint(arena.layout)
        self._writer.arenas[layout] = arena
        self.core.add(Shelf(layout, arena.slots, shape.payload_stride, shape.payloads_at))

    def _forget(self, layout: str) -> None:
        log.info("arena removed for another", extra={"layout": layout})
        self.announcer.forget(layout)
        self.core.remove(layout)
        self._attached.discard(layout)
        self._directory.remove(self._writer.arenas.pop(layout))

    def _slots_for(self, layout: KvLayout) -> int:
        """As many as all the memory holds: the budget is shared, the files are sparse."""
        one = geometry(layout, 1)
        slots = max(0, self.core.room.budget - PAGE) // (one.payload_stride + one.header_stride)
        while slots and geometry(layout, slots).file_bytes > self.core.room.budget:
            slots -= 1
        return slots

    # ---- questions

    def find(self, question: Find) -> Found | NotServed:
        """What the arena has; `land` and another `find` under the same lease add what tiers have."""
        if question.layout not in self._attached:
            return _unknown(question.layout)
        key = LeaseKey(question.layout, question.owner, question.lease)
        hashes = whole_hashes(question.hashes)[:MAX_BLOCKS]
        now = self._clock()
        # Half of the time at the most: what is not looked at by then is a miss this time.
        self._check(question.layout, self.core.unchecked(question.layout, hashes), now + question.deadline / 2)
        slots, actions = self.core.find(key, hashes, now)
        self._writer.carry_out(actions)
        return Found(arena=self._arena(question.layout), slots=numbers(slots), generations=generations(slots))

    def count(self, hits: int, lower_hits: int, misses: int) -> None:
        """Called once for each search, when it is over."""
        self._hits += hits
        self._lower_hits += lower_hits
        self._misses += misses
        metrics.HITS.labels("arena").inc(hits - lower_hits)
        metrics.HITS.labels("lower").inc(lower_hits)
        metrics.MISSES.inc(misses)

    def reserve(self, question: Reserve) -> Reserved | NotServed:
        if question.layout not in self._attached:
            return _unknown(question.layout)
        key = LeaseKey(question.layout, question.owner, question.lease)
        wanted = wanted_by(question)
        if wanted is None:
            return NotServed("hashes, parents and tokens do not fit together")
        slots = self._reserve(key, wanted[:MAX_BLOCKS])
        slots += [None] * (len(wanted) - len(slots))
        return Reserved(arena=self._arena(question.layout), slots=numbers(slots), generations=generations(slots))

    def _reserve(self, key: LeaseKey, wanted: Sequence[Wanted]) -> list[Slot | None]:
        shelf = self.core.room.shelves[key.layout]
        absent = sum(each.hash not in shelf.blocks for each in wanted)
        slots, without = self._claim(key, wanted)
        if without:
            log.warning("shared memory is full", extra={"taken": self.core.room.memory})
            # The core knows now that there is no more: for these, others must go.
            again, _ = self._claim(key, [wanted[at] for at in without])
            for at, slot in zip(without, again, strict=True):
                slots[at] = slot
        metrics.REFUSED.inc(absent - sum(slot is not None for slot in slots))
        return slots

    def _claim(self, key: LeaseKey, wanted: Sequence[Wanted]) -> tuple[list[Slot | None], list[int]]:
        """Also which of `wanted` got none because the system had no memory."""
        now = self._clock()
        slots, actions = self.core.reserve(key, wanted, now)
        refused = self._writer.carry_out(actions)
        without = [at for at, slot in enumerate(slots) if slot is not None and slot.number in refused]
        for at in without:
            slot, slots[at] = slots[at], None
            assert slot is not None
            self._writer.carry_out(self.core.no_memory(key, slot.number, now))
        return slots, without

    def commit(self, question: Commit) -> Committed | NotServed:
        if question.layout not in self._attached:
            return _unknown(question.layout)
        return Committed(self._commit(LeaseKey(question.layout, question.owner, question.lease), "engine"))

    def _commit(self, key: LeaseKey, source: str) -> int:
        arena = self._writer.arenas[key.layout]
        written = self.core.being_written(key)
        whole = {slot for slot in written if arena.whole(slot)}
        blocks, actions = self.core.commit(key, whole, self._clock())
        self._writer.carry_out(actions)
        metrics.STORED.labels(source).inc(blocks)
        metrics.UNWRITTEN.inc(len(written) - len(whole))
        return blocks

    def release(self, message: Release) -> None:
        key = LeaseKey(message.layout, message.owner, message.lease)
        self._writer.carry_out(self.core.release(key, frozenset(split_hashes(message.drop))))

    def owner_gone(self, owner: Owner) -> None:
        self._writer.carry_out(self.core.owner_gone(owner, self._clock()))

    def time_passed(self) -> None:
        self._writer.carry_out(self.core.time_passed(self._clock()))

    # ---- memory ahead of its use

    def prepare(self, layout: str) -> int | None:
        """A slot whose memory should be taken in the background; `prepared` tells the outcome."""
        shelf = self.core.shelf(layout)
        return None if shelf is None else self.core.room.prepare(shelf)

    def prepared(self, arena: OwnedArena, slot: int, taken: bool) -> None:
        layout = arena.path.stem
        if self._writer.arenas.get(layout) is arena:
            self.core.room.prepared(self.core.room.shelves[layout], slot, taken, self._clock())

    # ---- tiers and other nodes

    def arena_of(self, layout: str) -> OwnedArena | None:
        return self._writer.arenas.get(layout)

    def missing(self, layout: str, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """What comes behind the leading run that is here."""
        shelf = self.core.shelf(layout)
        return hashes if shelf is None else hashes[len(shelf.run(hashes)) :]

    def land(self, layout: str, block: CarriedBlock) -> bool:
        """Takes a checked block from elsewhere into the arena; False where it finds no room. True, too, where it is
        here already or being written."""
        shelf = self.core.shelf(layout)
        if shelf is None or block.hash in shelf.blocks:
            return shelf is not None
        self._landings += 1
        key = LeaseKey(layout, self._self, LeaseId(self._landings))
        [slot] = self._reserve(key, [Wanted(block.hash, BlockHash(block.parent), block.tokens)])
        if slot is None:
            return False
        self._writer.arenas[layout].fill(slot.number, block)
        return bool(self._commit(key, "lower"))

    def lend(
        self, layout: str, hashes: Sequence[BlockHash]
    ) -> contextlib.AbstractContextManager[Sequence[CarriedBlock]] | None:
        """See `kvstore.tiers.Lender`."""
        return self._lent(layout, hashes) if layout in self._writer.arenas else None

    @contextlib.contextmanager
    def _lent(self, layout: str, hashes: Sequence[BlockHash]) -> Iterator[Sequence[CarriedBlock]]:
        shelf = self.core.room.shelves[layout]
        self._check(layout, self.core.unchecked(layout, hashes), self._clock() + LEND_CHECK_SECONDS)
        run = checked_run(shelf, hashes)
        self.core.pin(shelf, run)
        try:
            yield [self._writer.arenas[layout].carried(block.slot) for block in run]
        finally:
            self._writer.carry_out(self.core.unpin(shelf, run))

    # ---- checksums

    def check_some(self, seconds: float) -> bool:
        """Compares blocks that a former store left with their checksums, those used last first; whether some are
        left."""
        until = self._clock() + seconds
        while self._unchecked and self._clock() < until:
            layout, block = self._unchecked.popleft()
            shelf = self.core.shelf(layout)
            if shelf is not None and shelf.blocks.get(block.hash) is block and not block.checked:
                self._check(layout, [block], until)
        metrics.UNCHECKED.set(len(self._unchecked))
        return bool(self._unchecked)

    def _check(self, layout: str, blocks: Iterable[Block], until: float) -> None:
        """Stops at the first that is not sound: what follows is not reached by this chain any more."""
        for block in blocks:
            if self._clock() >= until:
                return
            sound = self._writer.arenas[layout].sound(block.slot)
            self._writer.carry_out(self.core.checked(layout, block, sound))
            if not sound:
                metrics.SPOILED.inc()
                log.warning("a block is spoiled", extra={"layout": layout, "hash": block.hash.hex()})
                return

    # ---- what there is

    def held(self, layout: str) -> Iterable[BlockHash]:
        """For the announcer: full blocks that are committed."""
        return [block.hash for block in self.core.room.shelves[layout].blocks.values() if _counts(block)]

    def holds(self, layout: str, name: BlockHash) -> bool:
        block = self.core.room.shelves[layout].blocks.get(name)
        return block is not None and _counts(block)

    def report(self) -> StoreReport:
        shelves = self.core.room.shelves.values()
        return StoreReport(
            node=self.node,
            slots=sum(shelf.slots for shelf in shelves),
            committed=sum(shelf.committed for shelf in shelves),
            reserved=sum(shelf.reserved for shelf in shelves),
            pinned=sum(shelf.pinned for shelf in shelves),
            bytes_used=sum((shelf.committed + shelf.reserved) * shelf.block_bytes for shelf in shelves),
            bytes_total=self.core.room.budget,
            hits=self._hits,
            misses=self._misses,
            lower_hits=self._lower_hits,
        )

    def close(self) -> None:
        for arena in self._writer.arenas.values():
            arena.close()
        self._directory.close()

    def _arena(self, layout: str) -> ArenaId:
        return self._writer.arenas[layout].arena


def _counts(block: Block) -> bool:
    return block.committed and block.tokens == BLOCK_SIZE


def _unknown(layout: str) -> NotServed:
    return NotServed(f"layout {layout} is not attached")


def _recovered(arena: OwnedArena) -> Iterator[Recovered]:
    for slot, header in arena.headers():
        committed, reserved = header.state == COMMITTED, header.state == RESERVED
        names = header.hash, header.parent
        yield Recovered(slot, header.generation, committed, reserved, *names, header.tokens, header.used)
