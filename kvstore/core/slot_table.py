"""Which slot of one arena is in which state, which block it holds, and which block is evicted first. Pure."""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from shared.blocks import BlockHash
from shared.reliability.transitions import IllegalTransition

HEAP_SLACK = 1024
"""Outdated entries that the heap of leaves may hold beside one for each block, before it is rebuilt."""


class SlotState(IntEnum):
    """The life cycle of a slot. A file header knows only free, reserved and committed (`layout.py`)."""

    ABSENT = 0
    """It has no memory."""
    PREPARING = 1
    """Another thread is taking its memory from the system."""
    FREE = 2
    """It has memory and no block."""
    RESERVED = 3
    """A block is being written to it under a lease."""
    COMMITTED = 4
    """It holds a block that can be found."""
    RESTING = 5
    """Its writers were lost and may still be writing; it is reused only after they must have stopped."""


TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    SlotState.ABSENT: frozenset(
        {SlotState.PREPARING, SlotState.RESERVED, SlotState.COMMITTED, SlotState.RESTING},
    ),
    SlotState.PREPARING: frozenset({SlotState.FREE, SlotState.ABSENT}),
    SlotState.FREE: frozenset({SlotState.RESERVED, SlotState.ABSENT}),
    SlotState.RESERVED: frozenset({SlotState.COMMITTED, SlotState.FREE, SlotState.RESTING, SlotState.ABSENT}),
    SlotState.COMMITTED: frozenset({SlotState.FREE}),
    SlotState.RESTING: frozenset({SlotState.FREE}),
}
"""Which state may follow which. absent → committed, resting: found so in the file at the start. free → absent: its
memory is given back for another layout. reserved → free: released or not wholly written; → resting: the lease ran out
or its owner is gone; → absent: the system had no memory for it. committed → free: evicted, dropped or spoiled."""

_ABSENT, _PREPARING, _FREE, _RESERVED, _COMMITTED, _RESTING = map(int, SlotState)
"""Plain integers, as a member of an enumeration costs more to look up than the whole check of a step."""
_ALLOWED = tuple(tuple(to in TRANSITIONS[state] for to in SlotState) for state in SlotState)
_STATE_BITS, _STATE_MASK, _HISTORY_MASK = 4, 0xF, 0xFFFF_FFFF_FFFF_FFFF


@dataclass(slots=True, eq=False)
class StoredBlock:
    """One block in the arena: committed, or reserved and being written."""

    hash: BlockHash
    parent: BlockHash
    tokens: int
    slot: int
    committed: bool = False
    pins: int = 0
    used: int = 0
    """Order of use over all layouts; larger is more recent."""
    used_at: float = 0.0
    """Seconds on the caller's clock."""
    checked: bool = True
    """False: found in the file at the start, and its checksums not compared yet."""
    doomed: bool = False
    """Is dropped with its last pin, and is not found until then."""


class RestingSlot(NamedTuple):
    """A slot that is free again at `until`."""

    until: float
    slot: int


class SlotTable:
    """Owns the slots of one arena, each in one of the states of `SlotState`; only reserved and committed ones hold a
    block. Every change of state is checked against `TRANSITIONS`; one that is not allowed raises IllegalTransition."""

    def __init__(self, layout: str, slots: int, block_bytes: int, fixed_bytes: int, block_size: int) -> None:
        self.layout = layout
        self.slots = slots
        self.block_bytes = block_bytes
        self.fixed_bytes = fixed_bytes
        """Bytes of headers, which are taken from the start."""
        self.block_size = block_size
        """Tokens of a full block."""
        self.blocks: dict[BlockHash, StoredBlock] = {}
        self.generations = array("Q", bytes(8 * slots))
        self.absent = list(range(slots - 1, -1, -1))
        self.preparing: set[int] = set()
        self.free: list[int] = []
        self.resting: deque[RestingSlot] = deque()
        self.committed = 0
        self.pinned = 0
        """Blocks with one pin or more."""
        self.children: dict[BlockHash, int] = {}
        """Blocks here whose parent is this one, whether that is here or not."""
        self.leaves: list[tuple[int, BlockHash]] = []
        """A heap, least recently used first; entries that no longer hold are passed over."""
        self._history = array("Q", bytes(8 * slots))
        """The last 16 states of each slot, four bits each, the present one lowest."""

    # ---- sizes

    @property
    def memory(self) -> int:
        """Bytes that are taken from the system."""
        return self.fixed_bytes + (self.slots - len(self.absent)) * self.block_bytes

    @property
    def reserved(self) -> int:
        """The number of slots that are being written to, or may still be."""
        return len(self.blocks) - self.committed + len(self.resting)

    # ---- states of slots

    def state(self, slot: int) -> SlotState:
        """The slot's present state."""
        return SlotState(self._history[slot] & _STATE_MASK)

    def _move(self, slot: int, state: int) -> None:
        history = self._history[slot]
        if not _ALLOWED[history & _STATE_MASK][state]:
            raise IllegalTransition(f"{self.layout}, slot {slot}: {_path(history)} → {SlotState(state).name.lower()}")
        self._history[slot] = (history << _STATE_BITS | state) & _HISTORY_MASK

    def reserve_free(self) -> int:
        """Reserves a free slot, which there must be; its block is added with `put`."""
        slot = self.free.pop()
        self._move(slot, _RESERVED)
        return slot

    def reserve_absent(self) -> int:
        """Reserves a slot without memory, which there must be: the caller takes memory for it."""
        slot = self.absent.pop()
        self._move(slot, _RESERVED)
        return slot

    def start_preparing(self) -> int:
        """The slot without memory whose memory is taken next; there must be one."""
        slot = self.absent.pop()
        self._move(slot, _PREPARING)
        self.preparing.add(slot)
        return slot

    def finish_preparing(self, slot: int, *, taken: bool) -> None:
        """Ends `start_preparing`: the slot has its memory, or the system had none."""
        self.preparing.remove(slot)
        self._move(slot, _FREE if taken else _ABSENT)
        (self.free if taken else self.absent).append(slot)

    def give_back(self) -> int:
        """Makes a free slot absent, which there must be: the caller returns its memory to the system."""
        slot = self.free.pop()
        self._move(slot, _ABSENT)
        self.absent.append(slot)
        return slot

    def free_block(self, block: StoredBlock) -> None:
        """Takes the block out; its slot is free."""
        self._take_out(block)
        self._move(block.slot, _FREE)
        self.free.append(block.slot)

    def unreserve(self, block: StoredBlock) -> None:
        """Takes a reserved block out whose slot could get no memory."""
        self._take_out(block)
        self._move(block.slot, _ABSENT)
        self.absent.append(block.slot)

    def rest_block(self, block: StoredBlock, until: float) -> None:
        """Takes a reserved block out; its slot rests."""
        self._take_out(block)
        self.rest(block.slot, until)

    def rest(self, slot: int, until: float) -> None:
        """The slot, which holds no block, is not used before `until`; never earlier than a slot that rests already."""
        self._move(slot, _RESTING)
        self.resting.append(RestingSlot(until, slot))

    def end_rests(self, now: float) -> list[int]:
        """The slots whose rest is over at `now`; they are free."""
        slots: list[int] = []
        while self.resting and self.resting[0].until <= now:
            slots.append(self.resting.popleft().slot)
            self._move(slots[-1], _FREE)
        self.free.extend(slots)
        return slots

    def recover(self, blocks: Iterable[StoredBlock], resting: Iterable[int], until: float) -> None:
        """Restores what a former store left in the file: committed blocks, and slots that may still be written to. The
        table must not have been used yet."""
        for block in blocks:
            self._move(block.slot, _COMMITTED)
            self.expect_child(block.parent)
            self.put(block)
        for slot in resting:
            self.rest(slot, until)
        self.absent = [slot for slot in self.absent if self.state(slot) == _ABSENT]

    def next_generation(self, slot: int) -> int:
        """A generation that the slot never had; it is the slot's from now on."""
        self.generations[slot] += 1
        return self.generations[slot]

    # ---- blocks

    def find(self, name: BlockHash) -> StoredBlock | None:
        """The block if it can be read."""
        block = self.blocks.get(name)
        return block if block is not None and block.committed and not block.doomed else None

    def leading_run(self, hashes: Sequence[BlockHash]) -> list[StoredBlock]:
        """The leading blocks of `hashes` that can be read."""
        run: list[StoredBlock] = []
        for name in hashes:
            block = self.find(name)
            if block is None:
                break
            run.append(block)
        return run

    def checked_run(self, hashes: Sequence[BlockHash]) -> list[StoredBlock]:
        """The leading run of `hashes`, up to the first block whose checksums have not been compared."""
        run = self.leading_run(hashes)
        unchecked = next((at for at, block in enumerate(run) if not block.checked), len(run))
        return run[:unchecked]

    def expect_child(self, parent: BlockHash) -> None:
        """A block behind `parent` comes or is here: `parent` is not evicted as long."""
        self.children[parent] = self.children.get(parent, 0) + 1

    def forget_child(self, parent: BlockHash) -> None:
        """One of the blocks behind `parent` is gone, or does not come."""
        left = self.children[parent] - 1
        if left:
            self.children[parent] = left
            return
        del self.children[parent]
        if (block := self.blocks.get(parent)) is not None:
            self._note_leaf(block)

    def put(self, block: StoredBlock) -> None:
        """Adds a block whose slot is reserved or committed; its parent must expect it."""
        self.blocks[block.hash] = block
        self.committed += block.committed
        self._note_leaf(block)

    def _take_out(self, block: StoredBlock) -> None:
        del self.blocks[block.hash]
        self.committed -= block.committed
        self.forget_child(block.parent)

    def commit(self, block: StoredBlock, used: int, now: float) -> None:
        """A reserved block was written: it can be found from now on. `used`, `now`: as in `touch`."""
        self._move(block.slot, _COMMITTED)
        block.committed = True
        self.committed += 1
        self.touch(block, used, now)

    def pin(self, block: StoredBlock) -> None:
        """The block stays until `unpin` was called as often."""
        self.pinned += not block.pins
        block.pins += 1

    def unpin(self, block: StoredBlock) -> None:
        """Takes one pin off."""
        block.pins -= 1
        self.pinned -= not block.pins
        self._note_leaf(block)

    def touch(self, block: StoredBlock, used: int, now: float) -> None:
        """The block was used at `now`; `used` is larger than that of any other block."""
        block.used, block.used_at = used, now
        self._note_leaf(block)

    # ---- eviction

    def is_evictable(self, block: StoredBlock) -> bool:
        """Whether the block is not read or written, and no block that follows it is here."""
        return block.committed and not block.pins and block.hash not in self.children

    def oldest(self) -> StoredBlock | None:
        """The evictable block that was used least recently."""
        while self.leaves:
            used, name = self.leaves[0]
            block = self.blocks.get(name)
            if block is not None and block.used == used and self.is_evictable(block):
                return block
            heapq.heappop(self.leaves)
        return None

    def _note_leaf(self, block: StoredBlock) -> None:
        """Called whenever a block may have become evictable, or was used."""
        if not self.is_evictable(block):
            return
        heapq.heappush(self.leaves, (block.used, block.hash))
        if len(self.leaves) > len(self.blocks) + HEAP_SLACK:
            self.leaves = [(each.used, each.hash) for each in self.blocks.values() if self.is_evictable(each)]
            heapq.heapify(self.leaves)


def _path(history: int) -> str:
    """The states in `history` in their order; those of a slot that was never used are left out but for the last."""
    states = [SlotState(history >> at & _STATE_MASK) for at in range(60, -1, -_STATE_BITS)]
    first = next((at for at, state in enumerate(states) if state is not SlotState.ABSENT), len(states))
    return " → ".join(state.name.lower() for state in states[max(0, first - 1) :])
