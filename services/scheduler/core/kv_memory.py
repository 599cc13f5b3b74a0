"""Gives sequences their blocks and takes them back; finds what is already computed.

Why a block may be given away while a step that writes to it is still in flight: workers execute plans strictly in
order, and whoever gets the block writes to it in a later plan. So the old step's write is done before the new one's
first, whatever happened to the sequence in between.
"""

from __future__ import annotations

from typing import NamedTuple

from services.scheduler.core.block_pool import BlockPool
from services.scheduler.core.prefix_index import PrefixIndex
from services.scheduler.core.sequence import Sequence
from shared.blocks import BLOCK_SIZE, HASH_BYTES, BlockHash, blocks_for

NO_PARENT = bytes(HASH_BYTES)
"""In place of the hash before the first block's."""


class Fresh(NamedTuple):
    """A block that was given its name just now, and the name of the one before it in the chain."""

    hash: BlockHash
    parent: bytes


def chain(hashes: list[BlockHash], first: int, end: int) -> list[Fresh]:
    """Blocks `first` to `end` of a sequence, each with the one before it."""
    return [Fresh(hashes[i], hashes[i - 1] if i else NO_PARENT) for i in range(first, end)]


class KvMemory:
    """Owns the pool, the index, and every sequence's block table. A shared block is never written to."""

    def __init__(self, num_blocks: int, *, notes_fresh: bool = False) -> None:
        self.index = PrefixIndex()
        self.pool = BlockPool(num_blocks, self.index)
        self.fresh: list[Fresh] = []
        """Named since this was last emptied, where that is of interest."""
        self._notes_fresh = notes_fresh

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """Leading blocks of `sequence` that lie computed in the pool.

        Never all of its tokens: the last one is what the next is drawn from. A hit of everything gives the last
        block up instead of computing one token into it, since others may be reading it.
        """
        found: list[int] = []
        for hash_ in sequence.hashes[: sequence.reusable // BLOCK_SIZE]:
            block = self.index.find(hash_)
            if block is None:
                break
            found.append(block)
        return found

    def adopt(self, sequence: Sequence, cached: list[int]) -> None:
        """Starts the sequence's block table with blocks that are computed already."""
        for block in cached:
            self.pool.share(block)
        sequence.blocks = cached.copy()
        sequence.indexed = len(cached)
        sequence.planned = sequence.capacity = len(cached) * BLOCK_SIZE

    def grow(self, sequence: Sequence, tokens: int) -> list[int]:
        """New blocks until the table has room for `tokens`; the caller has looked whether they are free."""
        new = [self.pool.take() for _ in range(blocks_for(tokens) - len(sequence.blocks))]
        sequence.blocks += new
        sequence.capacity += len(new) * BLOCK_SIZE
        return new

    def fill(self, sequence: Sequence, tokens: int) -> None:
        """The blocks that it was given hold its first `tokens` now; those that are full can be shared."""
        sequence.planned = tokens
        sequence.indexed = tokens // BLOCK_SIZE

    def shrink(self, sequence: Sequence) -> None:
        """Gives back the blocks that hold nothing of the sequence."""
        kept = blocks_for(sequence.planned)
        self.pool.give_back(reversed(sequence.blocks[kept:]))
        del sequence.blocks[kept:]
        sequence.capacity = kept * BLOCK_SIZE

    def release(self, sequence: Sequence) -> None:
        """Gives all blocks back, the end first: the beginning of a prompt is what others are likely to share."""
        self.pool.give_back(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.capacity = sequence.indexed = 0

    def index_full_blocks(self, sequence: Sequence) -> None:
        """Offers blocks to sharing whose tokens are all known and planned. Called once the plan is issued: only later
        plans may then build on them."""
        full = min(len(sequence.tokens), sequence.planned) // BLOCK_SIZE
        for i in range(sequence.indexed, full):
            named = self.index.add(sequence.hashes[i], sequence.blocks[i])
            if named and self._notes_fresh:
                self.fresh += chain(sequence.hashes, i, i + 1)
        sequence.indexed = max(full, sequence.indexed)
