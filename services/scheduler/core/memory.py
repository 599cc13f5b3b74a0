"""KV memory of the ranks as the scheduler sees it: the index of prefixes, the pool of blocks, and who holds which.

A block may be given away while a step that writes to it is still in flight: workers execute plans strictly in order,
and the next sequence that gets the block writes to it in a later plan. So the old step's write is done before the new
one's first, whatever happened to the sequence in between.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from typing import NamedTuple

from services.scheduler.core.sequence import Sequence
from shared.blocks import HASH_BYTES, BlockHash, blocks_for
from shared.kv_events.stream import KvChanges
from shared.messages.worker import StateCopy

NO_PARENT = bytes(HASH_BYTES)
"""In place of the hash before the first block's."""


class PrefixIndex:
    """Owns the two-way map between block hashes and blocks: which block holds the keys and values of which tokens, and
    of all before them. It also gathers what changed in it, to be published."""

    def __init__(self) -> None:
        self.changes = KvChanges()
        self.block_of: dict[BlockHash, int] = {}
        """Every name with its block, free or in use; only this class writes it."""
        self.hash_of: dict[int, BlockHash] = {}
        """Every named block with its name; only this class writes it."""

    def add(self, hash_: BlockHash, block: int) -> bool:
        """Names `block`; whether that is its name now. Where the hash is known already the first block keeps it: two
        sequences computed the same tokens side by side, and one copy is enough to share. Raises ValueError for a block
        that has a name."""
        if block in self.hash_of:
            raise ValueError(f"block {block} is indexed already")
        if hash_ in self.block_of:
            return False
        self.block_of[hash_] = block
        self.hash_of[block] = hash_
        self.changes.stored(hash_)
        return True

    def remove(self, block: int) -> None:
        """Takes the block's name away: its contents are about to be overwritten. Raises KeyError where it has none."""
        hash_ = self.hash_of.pop(block)
        del self.block_of[hash_]
        self.changes.removed(hash_)

    def find(self, name: BlockHash) -> int | None:
        """The block of this name, whoever's it is."""
        return self.block_of.get(name)

    @property
    def is_consistent(self) -> bool:
        """Whether both sides of the map agree."""
        return {hash_: block for block, hash_ in self.hash_of.items()} == self.block_of


class NoFreeBlock(Exception):
    """A block was allocated from an empty pool; callers look at `free` first, so this is a bug."""


class BlockPool:
    """Owns the reference count of each block, and the order in which free blocks are allocated again.

    A free block is blank (its contents are of no use) or cached (the index knows it). Blank ones are allocated first,
    then cached ones, the least recently used first; only then does the index forget them.
    """

    def __init__(self, total: int, index: PrefixIndex, set_aside: int = 0) -> None:
        """`set_aside`: so many, the last ones, are in use from the start, by whoever makes the pool."""
        self.total = total
        self.index = index
        self.references = [0] * (total - set_aside) + [1] * set_aside
        """The count of each block, by its number; only this class writes it, as the two below."""
        self.blank = list(range(total - set_aside - 1, -1, -1))
        """Free blocks without contents; the last one is allocated first."""
        self.cached: OrderedDict[int, None] = OrderedDict()
        """Free blocks that the index knows, the least recently used first."""
        self.forgotten: set[int] = set()
        """Blocks in use whose names were taken away, though several sequences may share them."""

    @property
    def free(self) -> int:
        """Blocks without a reference, cached ones included."""
        return len(self.blank) + len(self.cached)

    def allocate(self) -> int:
        """A block for new contents, with one reference. Raises NoFreeBlock."""
        if self.blank:
            block = self.blank.pop()
        elif self.cached:
            block, _ = self.cached.popitem(last=False)
            self.index.remove(block)
        else:
            raise NoFreeBlock(f"all {self.total} blocks are in use")
        self.references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a block that is in use, or that the index knows."""
        if self.references[block] == 0:
            del self.cached[block]
        self.references[block] += 1

    def forget(self) -> int:
        """Takes the names off all blocks; those that nobody uses are blank then. Returns how many had one."""
        named = list(self.index.hash_of)
        for block in named:
            self.index.remove(block)
        self.forgotten.update(block for block in named if self.references[block])
        self.blank += self.cached
        self.cached.clear()
        return len(named)

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each; those released first are allocated again first. Raises ValueError for a block
        that has no reference."""
        references, named = self.references, self.index.hash_of
        for block in blocks:
            references[block] -= 1
            if references[block] == 0:
                self.forgotten.discard(block)
                if block in named:
                    self.cached[block] = None
                else:
                    self.blank.append(block)
            elif references[block] < 0:
                raise ValueError(f"block {block} was released more often than allocated")


class NamedBlock(NamedTuple):
    """The name of a block, and the name of the block before it in the chain."""

    hash: BlockHash
    parent: bytes
    place: int
    """Where its id stands in a sequence's block table."""


class FilledBlock(NamedTuple):
    """A block that a plan has filled, for a KV connector: the sequence's block `number`, and its name."""

    sequence: Sequence
    number: int
    block: int
    hash: BlockHash


def chain(hashes: list[BlockHash], first: int, end: int) -> list[NamedBlock]:
    """Blocks `first` to `end` (exclusive) of a sequence, each with the one before it."""
    return [NamedBlock(hashes[i], hashes[i - 1] if i else NO_PARENT, i) for i in range(first, end)]


class BlockAllocator:
    """Owns the pool, the index, and every sequence's block table. A shared block is never written to."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        for_store: bool = False,
        for_connector: bool = False,
        index: PrefixIndex | None = None,
        set_aside: int = 0,
    ) -> None:
        """`index`: an empty one; None: it makes one. `set_aside`: blocks of the pool that are for something else."""
        self.block_size = block_size
        """Tokens of a block."""
        self.index = PrefixIndex() if index is None else index
        self.pool = BlockPool(num_blocks, self.index, set_aside)
        self._for_store = for_store
        self._for_connector = for_connector
        self._newly_named: list[NamedBlock] = []
        self.filled: list[FilledBlock] = []
        """Blocks named since the last `take_filled`; only this class writes it."""

    @property
    def tables(self) -> int:
        """Block tables of each sequence: ids of the pool that a block of its tokens takes."""
        return 1

    @property
    def records(self) -> int:
        """Most records of the KV store that are saved at a time for a block of tokens."""
        return self.tables

    @property
    def step_rows(self) -> int:
        """See `KvCacheGroup.step_rows`."""
        return 0

    @property
    def can_load(self) -> bool:
        """Whether there is room for what is loaded beside blocks."""
        return True

    @property
    def blocks(self) -> int:
        """Blocks of tokens that tables have room for, free and in use."""
        return self.pool.total

    @property
    def free_blocks(self) -> int:
        """Blocks of tokens that can be added to tables."""
        return self.pool.free

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that all of the pool has room for."""
        return self.pool.total * self.block_size

    def blocks_in_use(self, sequences: Iterable[Sequence]) -> list[int]:
        """The pool's blocks in the tables of `sequences`, one for each reference that these hold."""
        return [block for sequence in sequences for block in sequence.blocks.numbers]

    def fits(self, sequence: Sequence, cached: list[int], coming: Iterable[Sequence], spare: int) -> bool:
        """Whether all known tokens of a sequence without blocks fit, of which the `cached` ones are there, beside all
        known tokens of those that are `coming`, and `spare` blocks of tokens."""
        size, references = self.block_size, self.pool.references
        promised = sum(blocks_for(s.tokens.length, size) - len(s.blocks.numbers) for s in coming)
        # Cached blocks that are free are taken from the pool, too.
        in_use = sum(1 for block in cached if references[block])
        return blocks_for(sequence.tokens.length, size) - in_use + promised + spare <= self.pool.free

    def share_at(self, sequence: Sequence, blocks: int) -> None:
        """Others wait for the first `blocks` of a sequence, to go on behind them: nothing is to be done where blocks
        are all that they need."""

    def step_end(self, sequence: Sequence, tokens: int) -> int:
        """Where a step of its prompt ends that could compute up to its first `tokens`."""
        return tokens

    def take_encoded(self, sequence: Sequence) -> tuple[list[int], bool]:
        """The blocks of rows beside the prompt of a sequence that a plan makes known to the workers, and whether keys
        and values lie in them already."""
        return [], False

    def take_restored(self, sequences: Iterable[Sequence]) -> tuple[StateCopy, ...]:
        """See `StepPlan.restored`; `sequences`: those that the plan makes known to the workers."""
        return ()

    def take_checkpoints(self) -> tuple[StateCopy, ...]:
        """See `StepPlan.checkpoints`."""
        return ()

    def reclaim(self, sequence: Sequence) -> None:
        """Releases what no step behind those planned reads of the sequence's blocks: nothing where every layer sees
        all tokens."""

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """Leading blocks of `sequence` that lie computed in the pool.

        Never all of its tokens: the last one is what the next is drawn from. A hit of everything gives the last
        block up instead of computing one token into it, since others may be reading it.
        """
        found: list[int] = []
        for hash_ in sequence.tokens.hashes[: sequence.reusable_blocks]:
            block = self.index.block_of.get(hash_)
            if block is None:
                break
            found.append(block)
        return found

    def needed(self, sequence: Sequence, first: int, tokens: int, partial: BlockHash | None) -> list[NamedBlock]:
        """The blocks from the sequence's block `first` on that whoever goes on behind its first `tokens` needs, by
        name, in the order of block tables. `partial`: what the last one is called, if these do not fill it."""
        hashes, full = sequence.tokens.hashes, tokens // self.block_size
        if tokens % self.block_size == 0:
            return chain(hashes, first, full)
        assert partial is not None, "a block that is not full has no name of its own"
        return chain([*hashes[:full], partial], first, full + 1)

    def block_of(self, sequence: Sequence, named: NamedBlock) -> int:
        """The pool's block that holds what is `needed` behind all that is planned of the sequence."""
        return sequence.blocks.numbers[named.place]

    def keep_end(self, sequence: Sequence) -> bool:
        """Keeps what others need beside blocks to go on behind all that is planned of the sequence, until that is
        released. False where it cannot be kept."""
        return True

    def ends(self, sequence: Sequence, first: int, tokens: int) -> list[BlockHash]:
        """Where a prefix can be gone on from only behind some of its blocks: a name for each of those from `first` on
        that end within its first `tokens`, under which the store has a record if it can. Else empty."""
        return []

    def start_load(self, sequence: Sequence, cached: list[int], tokens: int) -> list[int]:
        """Starts the sequence's block table with blocks that are computed already, and adds those that are to be
        loaded: what is `needed` behind them for its first `tokens`. Returns these."""
        self.adopt(sequence, cached)
        return self.grow(sequence, tokens)

    def name_loaded(self, place: int, name: BlockHash, block: int) -> None:
        """A block that was loaded has its name now; `place`: see `NamedBlock`."""
        self.index.add(name, block)

    def adopt(self, sequence: Sequence, cached: list[int]) -> None:
        """Starts the sequence's block table with blocks that are computed already."""
        for block in cached:
            self.pool.share(block)
        table = sequence.blocks
        table.numbers = cached.copy()
        table.indexed = len(cached)
        table.capacity = len(cached) * self.block_size
        sequence.tokens.set_planned(table.capacity)

    def grow(self, sequence: Sequence, tokens: int) -> list[int]:
        """Adds blocks until the table has room for `tokens`, and returns those. Raises NoFreeBlock: the caller looks
        first whether so many are free."""
        table = sequence.blocks
        new = [self.pool.allocate() for _ in range(blocks_for(tokens, self.block_size) - len(table.numbers))]
        table.numbers += new
        table.capacity += len(new) * self.block_size
        return new

    def fill(self, sequence: Sequence, tokens: int, computed: int = 0) -> None:
        """The blocks that it was given hold its first `tokens` now; those that are full have their names. Behind them
        they hold `computed` more, whose blocks have none yet."""
        sequence.tokens.set_planned(tokens + computed)
        sequence.blocks.indexed = tokens // self.block_size

    def shrink(self, sequence: Sequence) -> None:
        """Releases the blocks that hold nothing of the sequence: a load has failed."""
        table = sequence.blocks
        kept = blocks_for(sequence.tokens.planned, self.block_size)
        self.pool.release(reversed(table.numbers[kept:]))
        del table.numbers[kept:]
        table.capacity = kept * self.block_size

    def release(self, sequence: Sequence, last: Container[BlockHash] = ()) -> None:
        """Releases all its blocks, the end first: the beginning of a prompt is what others are likely to share. Those
        named in `last` are allocated again behind the others."""
        table = sequence.blocks
        numbers = table.numbers[::-1]
        if last:
            numbers.sort(key=lambda block: self.index.hash_of.get(block) in last)
        self.pool.release(numbers)
        table.numbers = []
        table.capacity = table.indexed = 0
        sequence.tokens.set_planned(0)

    def names(self, sequence: Sequence) -> list[BlockHash]:
        """Under which the full blocks that it holds were indexed, or equal ones of others."""
        return sequence.tokens.hashes[: sequence.blocks.indexed]

    def forget_names(self, sequence: Sequence) -> None:
        """Takes the names off the blocks that only this sequence uses, so that nobody finds them once it has ended."""
        for block in sequence.blocks.numbers:
            if block in self.index.hash_of and self.pool.references[block] == 1:
                self.index.remove(block)

    def index_full_blocks(self, sequence: Sequence) -> None:
        """Names the blocks whose tokens are all known and planned, so that others may share them. Called once the plan
        is made: only later plans may build on them."""
        tokens, table = sequence.tokens, sequence.blocks
        full = min(len(tokens.hashes), tokens.planned // self.block_size)
        for i in range(table.indexed, full):
            named = self.index.add(tokens.hashes[i], table.numbers[i])
            if named and self._for_store:
                self._newly_named += chain(tokens.hashes, i, i + 1)
            if named and self._for_connector:
                self.filled.append(FilledBlock(sequence, i, table.numbers[i], tokens.hashes[i]))
        table.indexed = max(full, table.indexed)

    def take_newly_named(self) -> list[NamedBlock]:
        """Blocks named since the last call; none where no store is used."""
        named, self._newly_named = self._newly_named, []
        return named

    def take_filled(self) -> list[FilledBlock]:
        """Blocks named since the last call which still hold what they are named for; none without a KV connector."""
        filled, self.filled = self.filled, []
        return [each for each in filled if self.index.block_of.get(each.hash) == each.block]
