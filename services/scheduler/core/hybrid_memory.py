"""KV memory of models whose layers differ in what they see: each group of layers has block tables of its own.

After vLLM's hybrid KV cache manager (https://docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager.html): all groups
take blocks of one pool. A group of sliding-window layers gives back what lies behind its window, and leaves the null
block in its place. A prefix is cached as far as every group can go on from there: one that sees all tokens needs all
blocks before, one with a window only those that the next token sees.

A block is given back before its sequence is given work in a step, and only if nothing from that step's first position
on is read there. Steps before read it still; but whoever gets the block writes to it in this step or a later one, and
workers execute plans strictly in order. Positions only go back to the last token that is known (rejected drafts).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import NamedTuple

from services.scheduler.core.memory import BlockAllocator, PrefixIndex
from services.scheduler.core.sequence import Sequence
from shared.blocks import BlockHash, blocks_for
from shared.messages.kv_groups import NULL_BLOCK, KvCacheGroup, longest_sequence


class GroupedPrefixIndex(PrefixIndex):
    """Owns a map between hashes and blocks for each group. What is published is what the first group holds: it sees
    all tokens wherever any group does."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.blocks_of: list[dict[BlockHash, int]] = [self.block_of, *({} for _ in range(groups - 1))]
        """For each group every name with its block; only this class writes it."""
        self._group_of: dict[int, int] = {}

    def add_to(self, group: int, hash_: BlockHash, block: int) -> None:
        """Names `block`, unless another one of the group has this name. Raises ValueError for one that has a name."""
        if group == 0:
            self.add(hash_, block)
            return
        if block in self.hash_of:
            raise ValueError(f"block {block} is indexed already")
        if hash_ not in self.blocks_of[group]:
            self.blocks_of[group][hash_] = block
            self.hash_of[block] = hash_
            self._group_of[block] = group

    def remove(self, block: int) -> None:
        """See `PrefixIndex.remove`."""
        group = self._group_of.pop(block, 0)
        if group == 0:
            super().remove(block)
        else:
            del self.blocks_of[group][self.hash_of.pop(block)]

    @property
    def is_consistent(self) -> bool:
        """Whether both sides of the maps agree."""
        named = {block: hash_ for blocks in self.blocks_of for hash_, block in blocks.items()}
        return named == self.hash_of and sum(map(len, self.blocks_of)) == len(named)


class _Need(NamedTuple):
    """Blocks of the pool."""

    most: int
    """That a sequence has at a time."""
    held: int


class HybridBlockAllocator(BlockAllocator):
    """A block allocator for several groups of layers, or for one with a window. In a sequence's block table the ids of
    all groups for its first block of tokens come first, then those for the second, and so on.

    It works without a KV store and without a KV connector: these know one block for each block of tokens.
    """

    def __init__(
        self, num_blocks: int, block_size: int, groups: tuple[KvCacheGroup, ...], max_batch_tokens: int
    ) -> None:
        """`groups`: one that sees all tokens comes first, if there is any. `max_batch_tokens`: of a step."""
        self._index = GroupedPrefixIndex(len(groups))
        super().__init__(num_blocks, block_size, index=self._index)
        self._groups = groups
        self._step_tokens = max_batch_tokens
        self._windows = [number for number, group in enumerate(groups) if group.window is not None]
        null = self.pool.allocate()
        assert null == NULL_BLOCK, "the first block of a pool"

    @property
    def tables(self) -> int:
        """See `BlockAllocator.tables`."""
        return len(self._groups)

    @property
    def free_blocks(self) -> int:
        """See `BlockAllocator.free_blocks`."""
        return self.pool.free // len(self._groups)

    @property
    def max_tokens(self) -> int:
        """See `BlockAllocator.max_tokens`."""
        return longest_sequence(self._groups, self.pool.total, self.block_size, self._step_tokens)

    def blocks_in_use(self, sequences: Iterable[Sequence]) -> list[int]:
        """See `BlockAllocator.blocks_in_use`; the null block once."""
        return [NULL_BLOCK, *(block for block in super().blocks_in_use(sequences) if block != NULL_BLOCK)]

    def fits(self, sequence: Sequence, cached: list[int], coming: Iterable[Sequence], spare: int) -> bool:
        """See `BlockAllocator.fits`. What a window gives back while a prompt is computed counts as given back."""
        promised = spare * len(self._groups)
        for other in coming:
            promised += sum(max(0, need.most - need.held) for need in self._needs(other))
        # Cached blocks of others save nothing in a window: its own take their place as it moves on.
        whole = [number for number, group in enumerate(self._groups) if group.window is None]
        hit = self._table_of_hit(sequence, len(cached))
        references, groups = self.pool.references, len(self._groups)
        in_use = sum(1 for number in whole for block in hit[number::groups] if references[block])
        return sum(need.most for need in self._needs(sequence)) - in_use + promised <= self.pool.free

    def _needs(self, sequence: Sequence) -> list[_Need]:
        """Of each group, until all known tokens are computed."""
        held = len(sequence.blocks.numbers) // len(self._groups)
        given_back = sequence.blocks.given_back or [0] * len(self._groups)
        length, size = sequence.tokens.length, self.block_size
        return [
            _Need(group.most_blocks(length, size, self._step_tokens), held - gone)
            for group, gone in zip(self._groups, given_back, strict=True)
        ]

    # ---- prefixes

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """The first group's blocks of the longest prefix that every group can go on from; see
        `BlockAllocator.cached_blocks`."""
        hashes, blocks_of = sequence.tokens.hashes, self._index.blocks_of
        count = min(sequence.reusable_blocks, len(hashes))
        for number, group in enumerate(self._groups):
            if group.window is None:
                known = blocks_of[number]
                count = next((i for i in range(count) if hashes[i] not in known), count)
        while count and (missing := self._last_missing(hashes, count)) is not None:
            count = missing  # every longer prefix within the window lacks it, too
        return self._table_of_hit(sequence, count)[:: len(self._groups)]

    def _last_missing(self, hashes: list[BlockHash], count: int) -> int | None:
        """A block that a group with a window lacks of those that it needs behind `count` blocks; None: it has all."""
        for number in self._windows:
            known, first = self._index.blocks_of[number], self._first_needed(number, count)
            for i in range(count - 1, first - 1, -1):
                if hashes[i] not in known:
                    return i
        return None

    def _first_needed(self, number: int, count: int) -> int:
        return min(count, self._groups[number].first_needed(count * self.block_size, self.block_size))

    def _table_of_hit(self, sequence: Sequence, count: int) -> list[int]:
        """The table of a sequence whose first `count` blocks are cached."""
        hashes, groups = sequence.tokens.hashes, len(self._groups)
        table = [NULL_BLOCK] * (count * groups)
        for number in range(groups):
            first, known = self._first_needed(number, count), self._index.blocks_of[number]
            table[first * groups + number :: groups] = [known[hashes[i]] for i in range(first, count)]
        return table

    def adopt(self, sequence: Sequence, cached: list[int]) -> None:
        """See `BlockAllocator.adopt`."""
        table, count = sequence.blocks, len(cached)
        table.numbers = self._table_of_hit(sequence, count)
        for block in table.numbers:
            if block != NULL_BLOCK:
                self.pool.share(block)
        table.given_back = [self._first_needed(number, count) for number in range(len(self._groups))]
        table.indexed = count
        table.capacity = count * self.block_size
        sequence.tokens.set_planned(table.capacity)

    def index_full_blocks(self, sequence: Sequence) -> None:
        """See `BlockAllocator.index_full_blocks`."""
        tokens, table, groups = sequence.tokens, sequence.blocks, len(self._groups)
        full = min(len(tokens.hashes), tokens.planned // self.block_size)
        for i in range(table.indexed, full):
            for number in range(groups):
                block = table.numbers[i * groups + number]
                if block != NULL_BLOCK:
                    self._index.add_to(number, tokens.hashes[i], block)
        table.indexed = max(full, table.indexed)

    # ---- tables

    def grow(self, sequence: Sequence, tokens: int) -> list[int]:
        """See `BlockAllocator.grow`; ids of all groups for each block."""
        table, groups = sequence.blocks, len(self._groups)
        blocks = blocks_for(tokens, self.block_size) - table.capacity // self.block_size
        new = [self.pool.allocate() for _ in range(blocks * groups)]
        table.numbers += new
        table.capacity += max(0, blocks) * self.block_size
        return new

    def reclaim(self, sequence: Sequence) -> None:
        """See `BlockAllocator.reclaim`: what lies behind the windows of all tokens still to be computed."""
        tokens, table, groups = sequence.tokens, sequence.blocks, len(self._groups)
        first_position = min(tokens.planned, len(tokens.known) - 1)
        for number in self._windows:
            group = self._groups[number]
            gone, needed = table.given_back[number], group.first_needed(first_position, self.block_size)
            if needed > gone:
                part = slice(gone * groups + number, needed * groups, groups)
                self.pool.release(table.numbers[part])
                table.numbers[part] = [NULL_BLOCK] * (needed - gone)
                table.given_back[number] = needed

    def release(self, sequence: Sequence, last: Container[BlockHash] = ()) -> None:
        """See `BlockAllocator.release`; no store keeps any, so `last` changes nothing."""
        table = sequence.blocks
        self.pool.release([block for block in reversed(table.numbers) if block != NULL_BLOCK])
        table.numbers, table.given_back = [], []
        table.capacity = table.indexed = 0
        sequence.tokens.set_planned(0)
