"""Which slot of one arena holds which block, which blocks may go, and which goes first."""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.blocks import BlockHash

HEAP_SLACK = 1024
"""Outdated entries that the heap of leaves may hold beside one for each block, before it is made anew."""


@dataclass(slots=True, eq=False)
class Block:
    """One block in the arena: committed, or reserved for whoever writes it."""

    hash: BlockHash
    parent: BlockHash
    tokens: int
    slot: int
    committed: bool = False
    pins: int = 0
    used: int = 0
    """Order of use, over all shelves."""
    used_at: float = 0.0
    checked: bool = True
    """False: found in the file at the start, and its checksums not compared yet."""
    doomed: bool = False
    """Goes with its last pin, and is not found until then."""


class Resting(NamedTuple):
    until: float
    slot: int


class Shelf:
    """Owns the slots of one arena, each of which is in one of six states: without memory (`absent`), getting it
    (`preparing`), free, resting, reserved, committed. Only the last two hold a block."""

    def __init__(self, layout: str, slots: int, block_bytes: int, fixed_bytes: int) -> None:
        self.layout = layout
        self.slots = slots
        self.block_bytes = block_bytes
        self.fixed_bytes = fixed_bytes
        """Headers."""
        self.blocks: dict[BlockHash, Block] = {}
        self.generations = array("Q", bytes(8 * slots))
        self.absent = list(range(slots - 1, -1, -1))
        self.preparing: set[int] = set()
        self.free: list[int] = []
        self.resting: deque[Resting] = deque()
        self.committed = 0
        self.pinned = 0
        """Blocks with one pin or more."""
        self.children: dict[BlockHash, int] = {}
        """Blocks here whose parent is this one, whether that is here or not."""
        self.leaves: list[tuple[int, BlockHash]] = []
        """A heap, least recently used first; entries that no longer hold are passed over."""

    @property
    def memory(self) -> int:
        """Bytes that are taken from the system."""
        return self.fixed_bytes + (self.slots - len(self.absent)) * self.block_bytes

    @property
    def reserved(self) -> int:
        """Slots that somebody writes to, or may."""
        return len(self.blocks) - self.committed + len(self.resting)

    def found(self, name: BlockHash) -> Block | None:
        """The block if it can be read."""
        block = self.blocks.get(name)
        return block if block is not None and block.committed and not block.doomed else None

    def run(self, hashes: Sequence[BlockHash]) -> list[Block]:
        """The leading blocks of `hashes` that can be read."""
        run: list[Block] = []
        for name in hashes:
            block = self.found(name)
            if block is None:
                break
            run.append(block)
        return run

    def next_generation(self, slot: int) -> int:
        self.generations[slot] += 1
        return self.generations[slot]

    def expect_child(self, parent: BlockHash) -> None:
        """A block behind `parent` comes or is here: `parent` stays as long."""
        self.children[parent] = self.children.get(parent, 0) + 1

    def child_gone(self, parent: BlockHash) -> None:
        left = self.children[parent] - 1
        if left:
            self.children[parent] = left
            return
        del self.children[parent]
        if (block := self.blocks.get(parent)) is not None:
            self.note_leaf(block)

    def put(self, block: Block) -> None:
        """The block's slot is its own from now on; its parent must be expecting it."""
        self.blocks[block.hash] = block
        self.committed += block.committed
        self.note_leaf(block)

    def take_out(self, block: Block) -> None:
        """The block's slot is nobody's: the caller says whose next."""
        del self.blocks[block.hash]
        self.committed -= block.committed
        self.child_gone(block.parent)

    def commit(self, block: Block) -> None:
        block.committed = True
        self.committed += 1

    def pin(self, block: Block) -> None:
        self.pinned += not block.pins
        block.pins += 1

    def unpin(self, block: Block) -> None:
        block.pins -= 1
        self.pinned -= not block.pins
        self.note_leaf(block)

    def touch(self, block: Block, used: int, now: float) -> None:
        block.used, block.used_at = used, now
        self.note_leaf(block)

    def evictable(self, block: Block) -> bool:
        return block.committed and not block.pins and block.hash not in self.children

    def oldest(self) -> Block | None:
        """The evictable block that was used least recently."""
        while self.leaves:
            used, name = self.leaves[0]
            block = self.blocks.get(name)
            if block is not None and block.used == used and self.evictable(block):
                return block
            heapq.heappop(self.leaves)
        return None

    def note_leaf(self, block: Block) -> None:
        """Called whenever a block may have become evictable, or was used."""
        if not self.evictable(block):
            return
        heapq.heappush(self.leaves, (block.used, block.hash))
        if len(self.leaves) > len(self.blocks) + HEAP_SLACK:
            self.leaves = [(each.used, each.hash) for each in self.blocks.values() if self.evictable(each)]
            heapq.heapify(self.leaves)

    def rest(self, slot: int, until: float) -> None:
        """`until` never lies before that of a slot that rests already."""
        self.resting.append(Resting(until, slot))

    def rested(self, now: float) -> list[int]:
        """Slots that are free again."""
        slots: list[int] = []
        while self.resting and self.resting[0].until <= now:
            slots.append(self.resting.popleft().slot)
        self.free.extend(slots)
        return slots
