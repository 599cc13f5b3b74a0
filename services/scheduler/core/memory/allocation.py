"""Gives sequences their blocks and takes them back; finds what is already computed.

A block may be given away while a step that writes to it is still in flight: workers execute plans strictly in order,
and the next sequence that gets the block writes to it in a later plan. So the old step's write is done before the new
one's first, whatever happened to the sequence in between.
"""

from __future__ import annotations

from typing import NamedTuple

from services.scheduler.core.memory.block_pool import BlockPool, PrefixIndex
from services.scheduler.core.sequence import Sequence
from shared.blocks import BLOCK_SIZE, HASH_BYTES, BlockHash, blocks_for

NO_PARENT = bytes(HASH_BYTES)
"""In place of the hash before the first block's."""


class NamedBlock(NamedTuple):
    """The name of a full block, and the name of the block before it in the chain."""

    hash: BlockHash
    parent: bytes


def chain(hashes: list[BlockHash], first: int, end: int) -> list[NamedBlock]:
    """Blocks `first` to `end` (exclusive) of a sequence, each with the one before it."""
    return [NamedBlock(hashes[i], hashes[i - 1] if i else NO_PARENT) for i in range(first, end)]


class BlockAllocator:
    """Owns the pool, the index, and every sequence's block table. A shared block is never written to."""

    def __init__(self, num_blocks: int, *, for_store: bool = False) -> None:
        self.index = PrefixIndex()
        self.pool = BlockPool(num_blocks, self.index)
        self._for_store = for_store
        self._newly_named: list[NamedBlock] = []

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """Leading blocks of `sequence` that lie computed in the pool.

        Never all of its tokens: the last one is what the next is drawn from. A hit of everything gives the last
        block up instead of computing one token into it, since others may be reading it.
        """
        found: list[int] = []
        for hash_ in sequence.tokens.hashes[: sequence.reusable // BLOCK_SIZE]:
            block = self.index.find(hash_)
            if block is None:
                break
            found.append(block)
        return found

    def adopt(self, sequence: Sequence, cached: list[int]) -> None:
        """Starts the sequence's block table with blocks that are computed already."""
        for block in cached:
            self.pool.share(block)
        table = sequence.blocks
        table.numbers = cached.copy()
        table.indexed = len(cached)
        table.capacity = len(cached) * BLOCK_SIZE
        sequence.tokens.set_planned(table.capacity)

    def grow(self, sequence: Sequence, tokens: int) -> list[int]:
        """Adds blocks until the table has room for `tokens`, and returns those. Raises NoFreeBlock: the caller looks
        first whether so many are free."""
        table = sequence.blocks
        new = [self.pool.allocate() for _ in range(blocks_for(tokens) - len(table.numbers))]
        table.numbers += new
        table.capacity += len(new) * BLOCK_SIZE
        return new

    def fill(self, sequence: Sequence, tokens: int) -> None:
        """The blocks that it was given hold its first `tokens` now; those that are full have their names."""
        sequence.tokens.set_planned(tokens)
        sequence.blocks.indexed = tokens // BLOCK_SIZE

    def shrink(self, sequence: Sequence) -> None:
        """Releases the blocks that hold nothing of the sequence."""
        table = sequence.blocks
        kept = blocks_for(sequence.tokens.planned)
        self.pool.release(reversed(table.numbers[kept:]))
        del table.numbers[kept:]
        table.capacity = kept * BLOCK_SIZE

    def release(self, sequence: Sequence) -> None:
        """Releases all its blocks, the end first: the beginning of a prompt is what others are likely to share."""
        table = sequence.blocks
        self.pool.release(reversed(table.numbers))
        table.numbers = []
        table.capacity = table.indexed = 0
        sequence.tokens.set_planned(0)

    def forget_names(self, sequence: Sequence) -> None:
        """Takes the names off the blocks that only this sequence uses, so that nobody finds them once it has ended."""
        for block in sequence.blocks.numbers:
            if self.index.holds(block) and self.pool.references[block] == 1:
                self.index.remove(block)

    def index_full_blocks(self, sequence: Sequence) -> None:
        """Names the blocks whose tokens are all known and planned, so that others may share them. Called once the plan
        is made: only later plans may build on them."""
        tokens, table = sequence.tokens, sequence.blocks
        full = min(len(tokens.hashes), tokens.planned // BLOCK_SIZE)
        for i in range(table.indexed, full):
            named = self.index.add(tokens.hashes[i], table.numbers[i])
            if named and self._for_store:
                self._newly_named += chain(tokens.hashes, i, i + 1)
        table.indexed = max(full, table.indexed)

    def take_newly_named(self) -> list[NamedBlock]:
        """Blocks named since the last call; none where no store is used."""
        named, self._newly_named = self._newly_named, []
        return named
