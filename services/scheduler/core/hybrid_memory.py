"""KV memory of models whose layers differ in what they see: each group of layers has block tables of its own.

After vLLM's hybrid KV cache manager (https://docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager.html): all groups
take blocks of one pool. A group of sliding-window layers gives back what lies behind its window, and leaves the null
block in its place. A prefix is cached as far as every group can go on from there: one that sees all tokens needs all
blocks before, one with a window only those that the next token sees.

The KV store has a record for each group's block, under a name of its own. A window's block that was given back is saved
as long as nobody else has its memory; loaded is only what the tokens behind the prefix see.

A block is given back before its sequence is given work in a step, and only if nothing from that step's first position
on is read there. Steps before read it still; but whoever gets the block writes to it in this step or a later one, and
workers execute plans strictly in order. Positions only go back to the last token that is known (rejected drafts).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import NamedTuple

from services.scheduler.core.memory import NO_PARENT, BlockAllocator, NamedBlock, PrefixIndex, chain
from services.scheduler.core.sequence import Sequence
from shared.blocks import BlockHash, blocks_for
from shared.kv_groups import NULL_BLOCK, KvCacheGroup, longest_sequence


def name_in(group: int, hash_: BlockHash) -> BlockHash:
    """What a group's block is called that holds the keys and values of the tokens that `hash_` names. The first group's
    has the hash itself, the others' differ from it in the last byte alone: as hard to collide with as 120 bits are."""
    return hash_ if group == 0 else BlockHash(hash_[:-1] + bytes((hash_[-1] ^ group,)))


class GroupedPrefixIndex(PrefixIndex):
    """Owns the map between names and blocks of all groups (`name_in`). What is published is what the first group holds:
    it sees all tokens wherever any group does."""

    def __init__(self) -> None:
        super().__init__()
        self.of_others: dict[BlockHash, int] = {}
        """Every name of another group than the first with its block; only this class writes it."""

    def find(self, name: BlockHash) -> int | None:
        """See `PrefixIndex.find`."""
        block = self.block_of.get(name)
        return self.of_others.get(name) if block is None else block

    def add_to(self, group: int, name: BlockHash, block: int) -> bool:
        """Names a block of a group; see `PrefixIndex.add`."""
        if group == 0:
            return self.add(name, block)
        if block in self.hash_of:
            raise ValueError(f"block {block} is indexed already")
        if name in self.of_others:
            return False
        self.of_others[name] = block
        self.hash_of[block] = name
        return True

    def remove(self, block: int) -> None:
        """See `PrefixIndex.remove`."""
        name = self.hash_of[block]
        if self.of_others.get(name) == block:
            del self.of_others[name], self.hash_of[block]
        else:
            super().remove(block)

    @property
    def is_consistent(self) -> bool:
        """Whether both sides of the maps agree."""
        named = {block: name for blocks in (self.block_of, self.of_others) for name, block in blocks.items()}
        return named == self.hash_of and len(self.block_of) + len(self.of_others) == len(named)


class _BlockDemand(NamedTuple):
    """Blocks of the pool."""

    most: int
    """That a sequence has at a time."""
    held: int


class HybridBlockAllocator(BlockAllocator):
    """A block allocator for several groups of layers, or for one with a window. In a sequence's block table the ids of
    all groups for its first block of tokens come first, then those for the second, and so on.

    It works without a KV connector: that knows one block for each block of tokens.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: tuple[KvCacheGroup, ...],
        max_batch_tokens: int,
        *,
        for_store: bool = False,
    ) -> None:
        """`groups`: one that sees all tokens comes first, if there is any. `max_batch_tokens`: of a step."""
        self._index = GroupedPrefixIndex()
        super().__init__(num_blocks, block_size, for_store=for_store, index=self._index)
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
    def blocks(self) -> int:
        """See `BlockAllocator.blocks`; the null block is none."""
        return (self.pool.total - 1) // len(self._groups)

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

    def _needs(self, sequence: Sequence) -> list[_BlockDemand]:
        """Of each group, until all known tokens are computed."""
        held = len(sequence.blocks.numbers) // len(self._groups)
        given_back = sequence.blocks.given_back or [0] * len(self._groups)
        length, size = sequence.tokens.length, self.block_size
        return [
            _BlockDemand(group.most_blocks(length, size, self._step_tokens), held - gone)
            for group, gone in zip(self._groups, given_back, strict=True)
        ]

    # ---- prefixes

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """The first group's blocks of the longest prefix that every group can go on from; see
        `BlockAllocator.cached_blocks`."""
        hashes, find = sequence.tokens.hashes, self._index.find
        count = min(sequence.reusable_blocks, len(hashes))
        for number, group in enumerate(self._groups):
            if group.window is None:
                count = next((i for i in range(count) if find(name_in(number, hashes[i])) is None), count)
        while count and (missing := self._last_missing(hashes, count)) is not None:
            count = missing  # every longer prefix within the window lacks it, too
        return self._table_of_hit(sequence, count)[:: len(self._groups)]

    def _last_missing(self, hashes: list[BlockHash], count: int) -> int | None:
        """A block that a group with a window lacks of those that it needs behind `count` blocks; None: it has all."""
        for number in self._windows:
            first = self._first_needed(number, count * self.block_size)
            for i in range(count - 1, first - 1, -1):
                if self._index.find(name_in(number, hashes[i])) is None:
                    return i
        return None

    def _first_needed(self, number: int, tokens: int) -> int:
        """The first block of a group that is read behind so many tokens, of those that hold them."""
        return min(blocks_for(tokens, self.block_size), self._groups[number].first_needed(tokens, self.block_size))

    def _table_of_hit(self, sequence: Sequence, count: int) -> list[int]:
        """The table of a sequence whose first `count` blocks are cached."""
        first = [self._first_needed(number, count * self.block_size) for number in range(len(self._groups))]
        return self._cached_table(sequence, count, first)

    def _cached_table(self, sequence: Sequence, count: int, first: list[int]) -> list[int]:
        """A table for `count` blocks, which are cached from each group's `first` one on."""
        hashes, groups, index = sequence.tokens.hashes, len(self._groups), self._index
        table = [NULL_BLOCK] * (count * groups)
        for number, begin in enumerate(first):
            blocks_of = index.of_others if number else index.block_of
            table[begin * groups + number :: groups] = [
                blocks_of[name_in(number, hashes[i])] for i in range(begin, count)
            ]
        return table

    def needed(self, sequence: Sequence, first: int, tokens: int, partial: BlockHash | None) -> list[NamedBlock]:
        """See `BlockAllocator.needed`: of a window what the token behind them sees. A window's blocks have no parents:
        each is forgotten by the store when it was not used for long, whichever follow it."""
        blocks, groups = super().needed(sequence, 0, tokens, partial), len(self._groups)
        begins = [max(first, self._first_needed(number, tokens)) for number in range(groups)]
        return [
            self._named(each, number)
            for each in blocks[min(begins) :]
            for number in range(groups)
            if each.place >= begins[number]
        ]

    def _named(self, block: NamedBlock, number: int) -> NamedBlock:
        """A group's block; `block`: what it would be called if there were no groups."""
        chained = self._groups[number].window is None and block.parent != NO_PARENT
        parent = name_in(number, BlockHash(block.parent)) if chained else NO_PARENT
        return NamedBlock(name_in(number, block.hash), parent, block.place * len(self._groups) + number)

    def start_load(self, sequence: Sequence, cached: list[int], tokens: int) -> list[int]:
        """See `BlockAllocator.start_load`; in the order of `needed`."""
        table, groups, count = sequence.blocks, len(self._groups), len(cached)
        first = [self._first_needed(number, tokens) for number in range(groups)]
        table.numbers = self._cached_table(sequence, count, [min(count, begin) for begin in first])
        self._share(table.numbers)
        new: list[int] = []
        for i in range(count, blocks_for(tokens, self.block_size)):
            row = [self.pool.allocate() if i >= begin else NULL_BLOCK for begin in first]
            table.numbers += row
            new += [block for block in row if block != NULL_BLOCK]
        table.given_back = first
        table.indexed = count
        table.capacity = blocks_for(tokens, self.block_size) * self.block_size
        sequence.tokens.set_planned(count * self.block_size)
        return new

    def name_loaded(self, place: int, name: BlockHash, block: int) -> None:
        """See `BlockAllocator.name_loaded`."""
        self._index.add_to(place % len(self._groups), name, block)

    def shrink(self, sequence: Sequence) -> None:
        """See `BlockAllocator.shrink`. What the windows before the load see was left out for it: the sequence starts
        again with what is cached."""
        self.release(sequence)
        self.adopt(sequence, self.cached_blocks(sequence))

    def names(self, sequence: Sequence) -> list[BlockHash]:
        """See `BlockAllocator.names`."""
        hashes, table = sequence.tokens.hashes, sequence.blocks
        return [
            name_in(number, hashes[i])
            for number, gone in enumerate(table.given_back)
            for i in range(gone, table.indexed)
        ]

    def _share(self, blocks: list[int]) -> None:
        for block in blocks:
            if block != NULL_BLOCK:
                self.pool.share(block)

    def adopt(self, sequence: Sequence, cached: list[int]) -> None:
        """See `BlockAllocator.adopt`."""
        table, count = sequence.blocks, len(cached)
        table.numbers = self._table_of_hit(sequence, count)
        self._share(table.numbers)
        table.given_back = [self._first_needed(number, count * self.block_size) for number in range(len(self._groups))]
        table.indexed = count
        table.capacity = count * self.block_size
        sequence.tokens.set_planned(table.capacity)

    def index_full_blocks(self, sequence: Sequence) -> None:
        """See `BlockAllocator.index_full_blocks`."""
        tokens, table, groups = sequence.tokens, sequence.blocks, len(self._groups)
        full = min(len(tokens.hashes), tokens.planned // self.block_size)
        for plain in chain(tokens.hashes, table.indexed, full):
            for number in range(groups):
                named = self._named(plain, number)
                block = table.numbers[named.place]
                if block != NULL_BLOCK and self._index.add_to(number, named.hash, block) and self._for_store:
                    self._newly_named.append(named)
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
        """See `BlockAllocator.release`."""
        table = sequence.blocks
        numbers = [block for block in reversed(table.numbers) if block != NULL_BLOCK]
        if last:
            numbers.sort(key=lambda block: self.index.hash_of.get(block) in last)
        self.pool.release(numbers)
        table.numbers, table.given_back = [], []
        table.capacity = table.indexed = 0
        sequence.tokens.set_planned(0)
