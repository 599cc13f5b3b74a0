"""Finds, reserves, commits and drops blocks. Owns all bookkeeping of a node's KV store; touches no memory, no clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from kvstore.core.actions import (
    Action,
    CommitSlot,
    DropBlock,
    FreeSlot,
    GiveMemoryBack,
    ReserveSlot,
    RetireSlot,
    TouchSlot,
)
from kvstore.core.leases import LeaseKey, Leases
from kvstore.core.memory_budget import MAX_EVICTIONS, MemoryBudget
from kvstore.core.slot_table import SlotTable, StoredBlock
from shared.blocks import BlockHash
from shared.messages.kvstore import KEEP_SECONDS, LeaseOwner

KEPT_SHARE = 4
"""At most one of so many slots of an arena is kept for later requests."""


class BlockToWrite(NamedTuple):
    """A block for which a slot is requested."""

    hash: BlockHash
    parent: BlockHash
    tokens: int


class SlotRef(NamedTuple):
    """Where a block lies, and in which generation of the slot."""

    number: int
    generation: int


class RecoveredHeader(NamedTuple):
    """A slot's header, as it was found in the file."""

    slot: int
    generation: int
    committed: bool
    reserved: bool
    hash: BlockHash
    parent: BlockHash
    tokens: int
    used: int


class StoreCore:
    """Owns index, slots and leases of every layout, under one budget of memory.

    Every method that changes something returns the actions that apply the change to the arenas.
    """

    def __init__(self, budget: int, lease_seconds: float) -> None:
        self.budget = MemoryBudget(budget)
        self.leases = Leases(lease_seconds)
        self._kept = Leases(KEEP_SECONDS)
        """Of blocks that wait for a later request: what nobody releases runs out."""
        self._uses = 0

    # ---- layouts

    def add(self, table: SlotTable) -> None:
        """A layout's arena is there from now on."""
        self.budget.tables[table.layout] = table

    def remove(self, layout: str) -> None:
        """Forgets a layout none of whose blocks is held by a lease."""
        table = self.budget.tables.pop(layout)
        assert not table.pinned
        assert not table.reserved

    def least_used(self) -> str | None:
        """The least recently used layout (by its newest block) none of whose blocks is held by a lease."""
        idle = [table for table in self.budget.tables.values() if not table.pinned and not table.reserved]
        ages = {table.layout: max((block.used for block in table.blocks.values()), default=0) for table in idle}
        return min(ages, key=ages.__getitem__, default=None)

    def table(self, layout: str) -> SlotTable | None:
        """The slots of a layout; None for one that is not attached."""
        return self.budget.tables.get(layout)

    def recover(self, table: SlotTable, headers: Iterable[RecoveredHeader], now: float) -> list[Action]:
        """Takes in what a former store left in a file. Slots that were being written rest for as long as a lease."""
        out: list[Action] = []
        blocks: dict[BlockHash, StoredBlock] = {}
        resting: list[int] = []
        for header in headers:
            table.generations[header.slot] = header.generation
            if header.committed and header.hash not in blocks:
                blocks[header.hash] = self._recovered_block(header, now)
            elif header.reserved:
                resting.append(header.slot)
                out.append(RetireSlot(table.layout, header.slot, table.next_generation(header.slot)))
            elif header.generation:
                # It may still have memory, and late readers.
                out.append(GiveMemoryBack(table.layout, header.slot, table.next_generation(header.slot)))
        table.recover(blocks.values(), resting, now + self.leases.seconds)
        return out

    def _recovered_block(self, header: RecoveredHeader, now: float) -> StoredBlock:
        self._uses = max(self._uses, header.used)
        block = StoredBlock(header.hash, header.parent, header.tokens, header.slot, committed=True, checked=False)
        block.used, block.used_at = header.used, now
        return block

    # ---- finding

    def unchecked(self, layout: str, hashes: Sequence[BlockHash]) -> list[StoredBlock]:
        """Blocks of the leading run of `hashes` whose checksums must be compared before a reader gets them."""
        return [block for block in self.budget.tables[layout].leading_run(hashes) if not block.checked]

    def checked(self, layout: str, block: StoredBlock, sound: bool) -> list[Action]:
        """Records the outcome of comparing checksums. A block that is not sound is dropped."""
        block.checked = True
        return [] if sound else self._drop(self.budget.tables[layout], block)

    def find(self, key: LeaseKey, hashes: Sequence[BlockHash], now: float) -> tuple[list[SlotRef], list[Action]]:
        """The leading run of `hashes` that is here and checked, pinned under the lease."""
        table = self.budget.tables[key.layout]
        return self._pin_under(self.leases, key, table.checked_run(hashes), now)

    def keep(self, key: LeaseKey, hashes: Sequence[BlockHash], now: float) -> tuple[list[SlotRef], list[Action]]:
        """As `find`, under a lease that lasts KEEP_SECONDS. Nothing where so much of the arena would be kept that
        others find no room."""
        table = self.budget.tables[key.layout]
        run = table.checked_run(hashes)
        if self._blocks_kept(key.layout) + len(run) > table.slots // KEPT_SHARE:
            return [], []
        return self._pin_under(self._kept, key, run, now)

    def _pin_under(
        self, leases: Leases, key: LeaseKey, run: list[StoredBlock], now: float
    ) -> tuple[list[SlotRef], list[Action]]:
        table = self.budget.tables[key.layout]
        lease = leases.open(key, now) if run else None
        if lease is None:
            return [], []
        self.pin(table, run)
        lease.pinned += run
        return [SlotRef(block.slot, table.generations[block.slot]) for block in run], self._touch(table, run, now)

    def _blocks_kept(self, layout: str) -> int:
        return sum(len(lease.pinned) for lease in self._kept.all() if lease.key.layout == layout)

    def pin(self, table: SlotTable, run: Iterable[StoredBlock]) -> None:
        """Keeps blocks from going until `unpin`, lease or not."""
        for block in run:
            table.pin(block)

    def unpin(self, table: SlotTable, run: Iterable[StoredBlock]) -> list[Action]:
        """Takes the pins of `pin` off. Blocks that were doomed meanwhile are dropped with their last pin."""
        out: list[Action] = []
        for block in run:
            table.unpin(block)
            if block.doomed and not block.pins:
                out += self._drop(table, block)
        return out

    # ---- writing

    def reserve(
        self, key: LeaseKey, wanted: Sequence[BlockToWrite], now: float
    ) -> tuple[list[SlotRef | None], list[Action]]:
        """A slot for each block; None where it is here, is being written, or finds no room (nor does any behind it)."""
        table = self.budget.tables[key.layout]
        lease = self.leases.open(key, now)
        if lease is None:
            return [None] * len(wanted), []
        # What is here already is in use at this moment: the new blocks are not to push it out.
        out = self._touch(table, [block for each in wanted if (block := table.find(each.hash)) is not None], now)
        evictions = self.budget.evictions + MAX_EVICTIONS
        slots: list[SlotRef | None] = []
        full = False
        for each in wanted:
            here = each.hash in table.blocks
            block = None if here or full else self._reserve_slot(table, each, now, evictions, out)
            full = full or (block is None and not here)
            if block is not None:
                lease.reserved.append(block)
            slots.append(None if block is None else SlotRef(block.slot, table.generations[block.slot]))
        if not lease.reserved and not lease.pinned:
            self.leases.end(key)
        return slots, out

    def _reserve_slot(
        self, table: SlotTable, wanted: BlockToWrite, now: float, evictions: int, out: list[Action]
    ) -> StoredBlock | None:
        # The parent must not be what makes room for its own child.
        table.expect_child(wanted.parent)
        taken = self.budget.reserve(table, now, evictions, out)
        if taken is None:
            table.forget_child(wanted.parent)
            return None
        slot, fresh = taken
        block = StoredBlock(wanted.hash, wanted.parent, wanted.tokens, slot)
        table.put(block)
        out.append(ReserveSlot(table.layout, slot, table.next_generation(slot), *wanted, fresh))
        return block

    def no_memory(self, key: LeaseKey, slot: int, now: float) -> list[Action]:
        """Undoes the reservation of a slot for which the system has no memory; no more is taken for a while."""
        table = self.budget.tables[key.layout]
        lease = self.leases.get(key)
        assert lease is not None
        block = next(block for block in lease.reserved if block.slot == slot)
        lease.reserved.remove(block)
        table.unreserve(block)
        self.budget.record_shortage(now)
        if not lease.reserved and not lease.pinned:
            self.leases.end(key)
        return [FreeSlot(table.layout, slot)]

    def reserved_slots(self, key: LeaseKey) -> list[int]:
        """The slots reserved under this lease."""
        lease = self.leases.get(key)
        return [] if lease is None else [block.slot for block in lease.reserved]

    def commit(self, key: LeaseKey, whole: Collection[int], now: float) -> tuple[int, list[Action]]:
        """Ends the lease and commits those of its blocks whose slots are `whole`. Returns how many, and the actions."""
        lease = self.leases.end(key)
        if lease is None:
            return 0, []
        table = self.budget.tables[key.layout]
        written = [block for block in lease.reserved if block.slot in whole]
        out: list[Action] = []
        for block in written:
            self._uses += 1
            table.commit(block, self._uses, now)
            out.append(CommitSlot(table.layout, block.slot, block.hash, block.tokens, block.used))
            if block.doomed:
                out += self._drop(table, block)
        out += self._take_back([block for block in lease.reserved if block.slot not in whole], table)
        return len(written), out + self.unpin(table, lease.pinned)

    # ---- ending

    def release(self, key: LeaseKey, now: float, drop: Collection[BlockHash] = ()) -> list[Action]:
        """Ends the lease at its owner's request, which writes to reserved slots no more; requests under it that come
        later find and reserve nothing. Pinned blocks in `drop` are dropped."""
        lease = self._kept.end(key) or self.leases.release(key, now)
        if lease is None:
            return []
        table = self.budget.tables[key.layout]
        for block in lease.pinned:
            block.doomed = block.doomed or block.hash in drop
        return self._take_back(lease.reserved, table) + self.unpin(table, lease.pinned)

    def forget(self) -> tuple[int, list[Action]]:
        """Drops every block: those that somebody reads or writes once that is over. Returns how many, and the
        actions."""
        blocks = [(table, block) for table in self.budget.tables.values() for block in table.blocks.values()]
        out: list[Action] = []
        for table, block in blocks:
            block.doomed = True
            if block.committed:
                out += self._drop(table, block)
        return len(blocks), out

    def owner_gone(self, owner: LeaseOwner, now: float) -> list[Action]:
        """Ends all leases of a process that has ended. Reserved slots rest, as its ranks may still write to them."""
        keys = [*self.leases.of(owner), *self._kept.of(owner)]
        return [action for key in keys for action in self._abandon(key, now)]

    def time_passed(self, now: float) -> list[Action]:
        """Ends the leases that have run out, frees the slots that have rested."""
        self.budget.update(now)
        keys = [*self.leases.expired(now), *self._kept.expired(now)]
        out = [action for key in keys for action in self._abandon(key, now)]
        for table in self.budget.tables.values():
            out += [FreeSlot(table.layout, slot) for slot in table.end_rests(now)]
        return out

    def _abandon(self, key: LeaseKey, now: float) -> list[Action]:
        lease = self.leases.end(key) or self._kept.end(key)
        assert lease is not None
        table = self.budget.tables[key.layout]
        out: list[Action] = []
        for block in lease.reserved:
            table.rest_block(block, now + self.leases.seconds)
            out.append(RetireSlot(table.layout, block.slot, table.next_generation(block.slot)))
        return out + self.unpin(table, lease.pinned)

    def _take_back(self, blocks: Iterable[StoredBlock], table: SlotTable) -> list[Action]:
        out: list[Action] = []
        for block in blocks:
            table.free_block(block)
            out.append(FreeSlot(table.layout, block.slot))
        return out

    def _drop(self, table: SlotTable, block: StoredBlock) -> list[Action]:
        block.doomed = True
        if block.pins:
            return []
        table.free_block(block)
        return [DropBlock(table.layout, block.slot, block.hash, block.tokens)]

    def _touch(self, table: SlotTable, run: Sequence[StoredBlock], now: float) -> list[Action]:
        out: list[Action] = []
        for block in run:
            self._uses += 1
            table.touch(block, self._uses, now)
            out.append(TouchSlot(table.layout, block.slot, block.used))
        return out
