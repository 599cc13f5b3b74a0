"""KV memory of models with states: a prefix is cached as far as there is a checkpoint of the states behind it.

Keys and values lie in blocks as everywhere. The ranks have places for checkpoints, copies of all states of a sequence
behind some of its tokens. Where a step is to leave one it ends there, at the border of a block: behind the last block
that another sequence with these tokens could use, and behind what it has in common with others. That is known of
blocks that are cached without a checkpoint, and of a sequence that waits for this one to compute what they share; so
the second or third to come with a common beginning finds a checkpoint there. (SGLang's radix cache of Mamba states
branches in the same way.) The least recently used checkpoint gives up its place.

In the KV store a checkpoint is so many records, its pages, each with a name that is made of its block's. On the ranks
they are numbered behind all blocks, place after place, so that they are saved and loaded as blocks are. A place whose
pages are being copied is not written to (`BlockTransfers` holds references to them). Whoever hands a sequence over
needs the states behind its last token, wherever that lies in a block: that checkpoint has a place until the sequence is
released, and its pages the name of the partial block.

Plans are executed in order: a place may be filled in the plan behind the one that reads it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from services.scheduler.core.memory import NO_PARENT, BlockAllocator, NamedBlock, PrefixIndex
from services.scheduler.core.sequence import Sequence
from shared.blocks import BlockHash, blocks_for
from shared.ids import SequenceId
from shared.kv_groups import StateRecords
from shared.messages.worker import StateCopy

_NUMBER_BYTES = 3


def page_name(number: int, hash_: BlockHash) -> BlockHash:
    """What the page of a checkpoint is called that lies behind the tokens that `hash_` names. It differs from that in
    three bytes alone: as hard to collide with as 104 bits are. The same again gives `hash_`."""
    tail = int.from_bytes(hash_[-_NUMBER_BYTES - 1 : -1]) ^ (number + 1)
    return BlockHash(hash_[: -_NUMBER_BYTES - 1] + tail.to_bytes(_NUMBER_BYTES) + hash_[-1:])


class CheckpointIndex(PrefixIndex):
    """Owns the names of blocks, and beside them those of checkpoints' pages, which are not published."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: dict[BlockHash, int] = {}
        """Every name of a page with its number; written by `StateBlockAllocator`."""

    def find(self, name: BlockHash) -> int | None:
        """See `PrefixIndex.find`."""
        block = self.block_of.get(name)
        return self.pages.get(name) if block is None else block


class StateBlockAllocator(BlockAllocator):
    """Owns which place holds the states behind which block, and where steps of sequences that compute their prompts are
    to end. It works without a KV connector: that knows no states."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        checkpoints: int,
        records: StateRecords | None = None,
        *,
        for_store: bool = False,
    ) -> None:
        """`checkpoints`: places for them. `records`: how a store keeps one; None: it keeps none."""
        self._pages = 0 if records is None else records.pages
        self._alone = records is not None and records.alone
        self._index = CheckpointIndex()
        super().__init__(
            num_blocks + checkpoints * self._pages,
            block_size,
            for_store=for_store and records is not None and not records.alone,
            index=self._index,
            set_aside=checkpoints * self._pages,
        )
        self._saves_pages = for_store and records is not None
        self._blocks = num_blocks
        self.free_places = list(range(checkpoints))
        """Of no use at present, though pages of some may still be copied; only this class writes it, as those below."""
        self.place_of: OrderedDict[BlockHash, int] = OrderedDict()
        """Of the states behind the block of this name, the least recently used first."""
        self.adopted: dict[SequenceId, int] = {}
        """The checkpoints that sequences go on from which the workers do not know yet: they stay."""
        self._landing: dict[SequenceId, int] = {}
        """Those that are being loaded, for whom."""
        self._ends: dict[SequenceId, int] = {}
        """Those behind the last token of sequences that are handed over."""
        self._borders: dict[SequenceId, list[int]] = {}
        """Blocks behind which each sequence is to leave a checkpoint, in rising order."""
        self._checkpoints: list[StateCopy] = []

    # ---- the pool

    @property
    def blocks(self) -> int:
        """See `BlockAllocator.blocks`; pages are none."""
        return self._blocks

    @property
    def max_tokens(self) -> int:
        """See `BlockAllocator.max_tokens`."""
        return self._blocks * self.block_size

    @property
    def records(self) -> int:
        """See `BlockAllocator.records`: a block, and the pages behind it."""
        return 1 + self._pages

    def blocks_in_use(self, sequences: Iterable[Sequence]) -> list[int]:
        """See `BlockAllocator.blocks_in_use`; each page once."""
        return [*super().blocks_in_use(sequences), *range(self._blocks, self.pool.total)]

    # ---- prefixes

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """Leading blocks of `sequence` that lie computed in the pool, up to the last one with a checkpoint."""
        found, names = super().cached_blocks(sequence), sequence.tokens.hashes
        while found and names[len(found) - 1] not in self.place_of:
            found.pop()
        return found

    def adopt(self, sequence: Sequence, cached: list[int]) -> None:
        """See `BlockAllocator.adopt`; the checkpoint behind them stays until the workers are told of it."""
        common = len(super().cached_blocks(sequence))
        super().adopt(sequence, cached)
        if cached:
            name = sequence.tokens.hashes[len(cached) - 1]
            self.adopted[sequence.id] = self.place_of[name]
            self.place_of.move_to_end(name)
        self._leave_checkpoints(sequence, {common, sequence.reusable_blocks}, len(cached))

    def _leave_checkpoints(self, sequence: Sequence, ends: set[int], computed: int) -> None:
        if sequence.tokens.hashes and not sequence.whole:
            self._borders[sequence.id] = sorted(end for end in ends if end > computed)

    def share_at(self, sequence: Sequence, blocks: int) -> None:
        """Others will go on behind its first `blocks`."""
        borders = self._borders.get(sequence.id)
        if borders is not None and blocks not in borders and blocks * self.block_size > sequence.tokens.planned:
            borders.append(blocks)
            borders.sort()

    def step_end(self, sequence: Sequence, tokens: int) -> int:
        """See `BlockAllocator.step_end`: before the next border, if it leaves a checkpoint there."""
        borders = self._borders.get(sequence.id)
        return min(tokens, borders[0] * self.block_size) if borders else tokens

    def index_full_blocks(self, sequence: Sequence) -> None:
        """See `BlockAllocator.index_full_blocks`; where a step ends at a border, the states are kept behind it."""
        super().index_full_blocks(sequence)
        borders, tokens = self._borders.get(sequence.id), sequence.tokens
        while borders and borders[0] * self.block_size <= tokens.planned:
            border = borders.pop(0)
            if border * self.block_size == tokens.planned:
                self._keep(sequence, tokens.hashes[border - 1])

    def take_restored(self, sequences: Iterable[Sequence]) -> tuple[StateCopy, ...]:
        """What new sequences of a plan go on from."""
        told = [
            StateCopy(sequence.id, self.adopted.pop(sequence.id))
            for sequence in sequences
            if sequence.id in self.adopted
        ]
        for copy in told:
            self._release_place(copy.checkpoint)
        return tuple(told)

    def take_checkpoints(self) -> tuple[StateCopy, ...]:
        """What is kept of sequences behind the plan."""
        taken, self._checkpoints = self._checkpoints, []
        return tuple(taken)

    def release(self, sequence: Sequence, last: Container[BlockHash] = ()) -> None:
        """See `BlockAllocator.release`."""
        super().release(sequence, last)
        self._borders.pop(sequence.id, None)
        for places in (self.adopted, self._landing, self._ends):
            if (place := places.pop(sequence.id, None)) is not None:
                self._release_place(place)

    def forget_names(self, sequence: Sequence) -> None:
        """See `BlockAllocator.forget_names`; and the checkpoints behind those blocks."""
        super().forget_names(sequence)
        in_use = self._in_use()
        for name in sequence.tokens.hashes:
            if name in self.place_of and name not in self.index.block_of and self.place_of[name] not in in_use:
                self._forget(name)

    # ---- from and to the KV store

    @property
    def can_load(self) -> bool:
        """See `BlockAllocator.can_load`: whether a place for a checkpoint is free, or would be given up."""
        return self._find_place() is not None

    def needed(self, sequence: Sequence, first: int, tokens: int, partial: BlockHash | None) -> list[NamedBlock]:
        """See `BlockAllocator.needed`: behind the blocks, with places of their own, the pages of the checkpoint."""
        if tokens <= 0:
            return []
        blocks = [] if self._alone else super().needed(sequence, first, tokens, partial)
        full, rest = divmod(tokens, self.block_size)
        name = partial if rest else sequence.tokens.hashes[full - 1]
        assert name is not None, "a block that is not full has no name of its own"
        behind = blocks_for(tokens, self.block_size)
        pages = [NamedBlock(page_name(i, name), NO_PARENT, behind + i) for i in range(self._pages)]
        return blocks + pages

    def block_of(self, sequence: Sequence, named: NamedBlock) -> int:
        """See `BlockAllocator.block_of`."""
        page = named.place - blocks_for(sequence.tokens.planned, self.block_size)
        return super().block_of(sequence, named) if page < 0 else self._pages_of(self._ends[sequence.id])[page]

    def keep_end(self, sequence: Sequence) -> bool:
        """See `BlockAllocator.keep_end`: the states behind the plan that is being made."""
        tokens = sequence.tokens
        full, rest = divmod(tokens.planned, self.block_size)
        if not self._pages:
            return False
        if rest:
            place = self._take_place()
            if place is not None:
                self._checkpoints.append(StateCopy(sequence.id, place))
        else:
            place = self._keep(sequence, tokens.hashes[full - 1])
        if place is not None:
            self._ends[sequence.id] = place
        return place is not None

    def ends(self, sequence: Sequence, first: int, tokens: int) -> list[BlockHash]:
        """See `BlockAllocator.ends`: the first page of each block's checkpoint."""
        if tokens % self.block_size:
            return []  # handed over, with the states behind just these
        return [page_name(0, hash_) for hash_ in sequence.tokens.hashes[first : tokens // self.block_size]]

    def start_load(self, sequence: Sequence, cached: list[int], tokens: int) -> list[int]:
        """See `BlockAllocator.start_load`; and the pages that a checkpoint is loaded to."""
        super().adopt(sequence, cached)
        self._leave_checkpoints(sequence, {sequence.reusable_blocks}, blocks_for(tokens, self.block_size))
        new = self.grow(sequence, tokens)
        place = self._take_place()
        assert place is not None, "the caller looks first whether one is free"
        self._landing[sequence.id] = place
        return ([] if self._alone else new) + self._pages_of(place)

    def name_loaded(self, place: int, name: BlockHash, block: int) -> None:
        """See `BlockAllocator.name_loaded`; a checkpoint has its name with its first page."""
        number, page = divmod(block - self._blocks, self._pages or 1)
        if number < 0:
            super().name_loaded(place, name, block)
        elif page == 0 and number in self._landing.values() and page_name(0, name) not in self.place_of:
            self._name(page_name(0, name), number)

    def fill(self, sequence: Sequence, tokens: int, computed: int = 0) -> None:
        """See `BlockAllocator.fill`; it goes on from the checkpoint that was loaded."""
        if self._alone:  # blocks hold nothing, so all of them are there
            sequence.tokens.set_planned(tokens)
            super().index_full_blocks(sequence)
        super().fill(sequence, tokens, computed)
        self.adopted[sequence.id] = self._landing.pop(sequence.id)

    def shrink(self, sequence: Sequence) -> None:
        """See `BlockAllocator.shrink`: the sequence starts again with what is cached."""
        self.release(sequence)
        self.adopt(sequence, self.cached_blocks(sequence))

    # ---- places

    def _keep(self, sequence: Sequence, name: BlockHash) -> int | None:
        """A place for the states behind the plan that is being made; None where none is free, and none given up."""
        if name in self.place_of:
            self.place_of.move_to_end(name)
            return self.place_of[name]
        place = self._take_place()
        if place is not None:
            self._name(name, place)
            self._checkpoints.append(StateCopy(sequence.id, place))
            if self._saves_pages:
                self._newly_named += [NamedBlock(page_name(i, name), NO_PARENT, i) for i in range(self._pages)]
        return place

    def _take_place(self) -> int | None:
        place = self._find_place()
        if place is None:
            return None
        if place in self.free_places:
            self.free_places.remove(place)
        else:
            self._forget(next(name for name, each in self.place_of.items() if each == place))
            self.free_places.remove(place)
        return place

    def _find_place(self) -> int | None:
        """One that is free, or of the least recently used checkpoint; not where pages are being copied."""
        in_use = self._in_use()
        named = (place for place in self.place_of.values() if place not in in_use)
        return next((place for place in (*self.free_places[::-1], *named) if not self._copied(place)), None)

    def _in_use(self) -> set[int]:
        return {*self.adopted.values(), *self._landing.values(), *self._ends.values()}

    def _copied(self, place: int) -> bool:
        """Whether any of its pages is being copied."""
        return any(self.pool.references[block] > 1 for block in self._pages_of(place))

    def _pages_of(self, place: int) -> list[int]:
        first = self._blocks + place * self._pages
        return list(range(first, first + self._pages))

    def _name(self, name: BlockHash, place: int) -> None:
        self.place_of[name] = place
        self._index.pages.update((page_name(i, name), block) for i, block in enumerate(self._pages_of(place)))

    def _forget(self, name: BlockHash) -> None:
        self.free_places.append(self.place_of.pop(name))
        for page in range(self._pages):
            del self._index.pages[page_name(page, name)]

    def _release_place(self, place: int) -> None:
        """Somebody needs it no more; it is free where nobody else does, and it has no name."""
        if place not in self._in_use() and place not in self.place_of.values():
            self.free_places.append(place)
