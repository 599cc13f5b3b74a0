"""Finds, reserves, shows and drops blocks. Owns all bookkeeping of a node's KV store; touches no memory, no clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from kvstore.core.actions import Action, Claimed, Dropped, Freed, GivenBack, Retired, Shown, Touched
from kvstore.core.leases import Lease, LeaseKey, Leases
from kvstore.core.room import MAX_EVICTIONS, Room
from kvstore.core.shelf import Block, Shelf
from shared.blocks import BlockHash
from shared.messages.kvstore import Owner


class Wanted(NamedTuple):
    """A block that somebody would write."""

    hash: BlockHash
    parent: BlockHash
    tokens: int


class Slot(NamedTuple):
    number: int
    generation: int


class Recovered(NamedTuple):
    """A slot's header, as it was found in the file."""

    slot: int
    generation: int
    committed: bool
    reserved: bool
    hash: BlockHash
    parent: BlockHash
    tokens: int
    used: int


class Store:
    """Owns index, slots and leases of every layout, under one budget of memory.

    Every method that changes something answers with the actions that make it so in the arenas.
    """

    def __init__(self, budget: int, lease_seconds: float) -> None:
        self.room = Room(budget)
        self.leases = Leases(lease_seconds)
        self._uses = 0

    # ---- layouts

    def add(self, shelf: Shelf) -> None:
        self.room.shelves[shelf.layout] = shelf

    def remove(self, layout: str) -> None:
        """Forgets a layout of which nobody holds anything."""
        shelf = self.room.shelves.pop(layout)
        assert not shelf.pinned
        assert not shelf.reserved

    def least_used(self) -> str | None:
        """The layout, of those of which nobody holds anything, whose newest block is the oldest."""
        idle = [shelf for shelf in self.room.shelves.values() if not shelf.pinned and not shelf.reserved]
        ages = {shelf.layout: max((block.used for block in shelf.blocks.values()), default=0) for shelf in idle}
        return min(ages, key=ages.__getitem__, default=None)

    def shelf(self, layout: str) -> Shelf | None:
        return self.room.shelves.get(layout)

    def recover(self, shelf: Shelf, headers: Iterable[Recovered], now: float) -> list[Action]:
        """Takes in what a former store left in a file. Slots that were being written rest for as long as a lease."""
        out: list[Action] = []
        for header in headers:
            shelf.generations[header.slot] = header.generation
            if header.committed and header.hash not in shelf.blocks:
                self._take_over(shelf, header, now)
            elif header.reserved:
                self._retire(shelf, header.slot, now, out)
            elif header.generation:
                # It may still have memory, and late readers.
                out.append(GivenBack(shelf.layout, header.slot, shelf.next_generation(header.slot)))
        held = {block.slot for block in shelf.blocks.values()} | {resting.slot for resting in shelf.resting}
        shelf.absent = [slot for slot in shelf.absent if slot not in held]
        return out

    def _take_over(self, shelf: Shelf, header: Recovered, now: float) -> None:
        self._uses = max(self._uses, header.used)
        block = Block(header.hash, header.parent, header.tokens, header.slot, committed=True, checked=False)
        block.used, block.used_at = header.used, now
        shelf.expect_child(header.parent)
        shelf.put(block)

    # ---- finding

    def unchecked(self, layout: str, hashes: Sequence[BlockHash]) -> list[Block]:
        """Those of the leading run whose checksums must be compared before they are given to anybody."""
        return [block for block in self.room.shelves[layout].run(hashes) if not block.checked]

    def checked(self, layout: str, block: Block, sound: bool) -> list[Action]:
        """The outcome. A block that is not what it was is dropped."""
        block.checked = True
        return [] if sound else self._drop(self.room.shelves[layout], block)

    def find(self, key: LeaseKey, hashes: Sequence[BlockHash], now: float) -> tuple[list[Slot], list[Action]]:
        """The leading run of `hashes` that is here and checked, pinned under the lease."""
        shelf = self.room.shelves[key.layout]
        run = checked_run(shelf, hashes)
        lease = self.leases.open(key, now) if run else None
        if lease is None:
            return [], []
        self.pin(shelf, run)
        lease.pinned += run
        return [Slot(block.slot, shelf.generations[block.slot]) for block in run], self._touch(shelf, run, now)

    def pin(self, shelf: Shelf, run: Iterable[Block]) -> None:
        """Keeps blocks from going until `unpin`, lease or not."""
        for block in run:
            shelf.pin(block)

    def unpin(self, shelf: Shelf, run: Iterable[Block]) -> list[Action]:
        out: list[Action] = []
        for block in run:
            shelf.unpin(block)
            if block.doomed and not block.pins:
                out += self._drop(shelf, block)
        return out

    # ---- writing

    def reserve(self, key: LeaseKey, wanted: Sequence[Wanted], now: float) -> tuple[list[Slot | None], list[Action]]:
        """A slot for each block; None where it is here, is being written, or finds no room (nor does any behind it)."""
        shelf = self.room.shelves[key.layout]
        lease = self.leases.open(key, now)
        if lease is None:
            return [None] * len(wanted), []
        # What is here already is in use at this moment: the new blocks are not to push it out.
        out = self._touch(shelf, [block for each in wanted if (block := shelf.found(each.hash)) is not None], now)
        evictions = self.room.evictions + MAX_EVICTIONS
        slots: list[Slot | None] = []
        full = False
        for each in wanted:
            here = each.hash in shelf.blocks
            block = None if here or full else self._claim(shelf, each, now, evictions, out)
            full = full or (block is None and not here)
            if block is not None:
                lease.reserved.append(block)
            slots.append(None if block is None else Slot(block.slot, shelf.generations[block.slot]))
        if not lease.reserved and not lease.pinned:
            self.leases.end(key)
        return slots, out

    def _claim(self, shelf: Shelf, wanted: Wanted, now: float, evictions: int, out: list[Action]) -> Block | None:
        # The parent must not be what makes room for its own child.
        shelf.expect_child(wanted.parent)
        taken = self.room.take(shelf, now, evictions, out)
        if taken is None:
            shelf.child_gone(wanted.parent)
            return None
        slot, fresh = taken
        block = Block(wanted.hash, wanted.parent, wanted.tokens, slot)
        shelf.put(block)
        out.append(Claimed(shelf.layout, slot, shelf.next_generation(slot), *wanted, fresh))
        return block

    def no_memory(self, key: LeaseKey, slot: int, now: float) -> list[Action]:
        """The system has no memory for a slot just reserved, so it is not; for a while, what there is must do."""
        shelf = self.room.shelves[key.layout]
        lease = self.leases.get(key)
        assert lease is not None
        block = next(block for block in lease.reserved if block.slot == slot)
        lease.reserved.remove(block)
        shelf.take_out(block)
        shelf.absent.append(slot)
        self.room.refused(now)
        if not lease.reserved and not lease.pinned:
            self.leases.end(key)
        return [Freed(shelf.layout, slot)]

    def being_written(self, key: LeaseKey) -> list[int]:
        """The slots reserved under this lease."""
        lease = self.leases.get(key)
        return [] if lease is None else [block.slot for block in lease.reserved]

    def commit(self, key: LeaseKey, whole: Collection[int], now: float) -> tuple[int, list[Action]]:
        """Ends the lease and shows those of its blocks whose slots are `whole`. How many, and what it takes."""
        lease = self.leases.end(key)
        if lease is None:
            return 0, []
        shelf = self.room.shelves[key.layout]
        shown = [block for block in lease.reserved if block.slot in whole]
        out: list[Action] = []
        for block in shown:
            shelf.commit(block)
            self._uses += 1
            shelf.touch(block, self._uses, now)
            out.append(Shown(shelf.layout, block.slot, block.hash, block.tokens, block.used))
        out += self._take_back([block for block in lease.reserved if block.slot not in whole], shelf)
        return len(shown), out + self.unpin(shelf, lease.pinned)

    # ---- ending

    def release(self, key: LeaseKey, drop: Collection[BlockHash] = ()) -> list[Action]:
        """Ends the lease by its owner's word: nobody writes to what was reserved any more."""
        lease = self.leases.end(key)
        if lease is None:
            return []
        shelf = self.room.shelves[key.layout]
        for block in lease.pinned:
            block.doomed = block.doomed or block.hash in drop
        return self._take_back(lease.reserved, shelf) + self.unpin(shelf, lease.pinned)

    def owner_gone(self, owner: Owner, now: float) -> list[Action]:
        """The owner's process has ended; its ranks may not know yet."""
        return [action for key in self.leases.of(owner) for action in self._abandon(key, now)]

    def time_passed(self, now: float) -> list[Action]:
        """Ends the leases that have run out, frees the slots that have rested."""
        self.room.time_passed(now)
        out = [action for key in self.leases.expired(now) for action in self._abandon(key, now)]
        for shelf in self.room.shelves.values():
            out += [Freed(shelf.layout, slot) for slot in shelf.rested(now)]
        return out

    def _abandon(self, key: LeaseKey, now: float) -> list[Action]:
        lease = self._ended(key)
        shelf = self.room.shelves[key.layout]
        out: list[Action] = []
        for block in lease.reserved:
            shelf.take_out(block)
            self._retire(shelf, block.slot, now, out)
        return out + self.unpin(shelf, lease.pinned)

    def _ended(self, key: LeaseKey) -> Lease:
        lease = self.leases.end(key)
        assert lease is not None
        return lease

    def _retire(self, shelf: Shelf, slot: int, now: float, out: list[Action]) -> None:
        shelf.rest(slot, now + self.leases.seconds)
        out.append(Retired(shelf.layout, slot, shelf.next_generation(slot)))

    def _take_back(self, blocks: Iterable[Block], shelf: Shelf) -> list[Action]:
        out: list[Action] = []
        for block in blocks:
            shelf.take_out(block)
            shelf.free.append(block.slot)
            out.append(Freed(shelf.layout, block.slot))
        return out

    def _drop(self, shelf: Shelf, block: Block) -> list[Action]:
        block.doomed = True
        if block.pins:
            return []
        shelf.take_out(block)
        shelf.free.append(block.slot)
        return [Dropped(shelf.layout, block.slot, block.hash, block.tokens)]

    def _touch(self, shelf: Shelf, run: Sequence[Block], now: float) -> list[Action]:
        out: list[Action] = []
        for block in run:
            self._uses += 1
            shelf.touch(block, self._uses, now)
            out.append(Touched(shelf.layout, block.slot, block.used))
        return out


def checked_run(shelf: Shelf, hashes: Sequence[BlockHash]) -> list[Block]:
    """The leading run of `hashes`, up to the first block that nobody has compared with its checksums."""
    run = shelf.run(hashes)
    unchecked = next((at for at, block in enumerate(run) if not block.checked), len(run))
    return run[:unchecked]
