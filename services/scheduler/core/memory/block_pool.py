"""The blocks of KV memory: how many sequences use each, which are free, and what the free ones still hold. Knows no
sequences."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, KeysView, Mapping, Sequence

from shared.blocks import BlockHash
from shared.kv_event_stream import KvChanges


class PrefixIndex:
    """Owns the two-way map between block hashes and blocks: which block holds the keys and values of which 16 tokens,
    and of all before them. It also gathers what changed in it, to be published."""

    def __init__(self) -> None:
        self.changes = KvChanges()
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}

    def find(self, hash_: BlockHash) -> int | None:
        """The block of that name, free or in use."""
        return self._block_of.get(hash_)

    def holds(self, block: int) -> bool:
        """Whether the block has a name."""
        return block in self._hash_of

    def add(self, hash_: BlockHash, block: int) -> bool:
        """Names `block`; whether that is its name now. Where the hash is known already the first block keeps it: two
        sequences computed the same tokens side by side, and one copy is enough to share. Raises ValueError for a block
        that has a name."""
        if block in self._hash_of:
            raise ValueError(f"block {block} is indexed already")
        if hash_ in self._block_of:
            return False
        self._block_of[hash_] = block
        self._hash_of[block] = hash_
        self.changes.stored(hash_)
        return True

    def remove(self, block: int) -> None:
        """Takes the block's name away: its contents are about to be overwritten. Raises KeyError where it has none."""
        hash_ = self._hash_of.pop(block)
        del self._block_of[hash_]
        self.changes.removed(hash_)

    @property
    def hash_of(self) -> Mapping[int, BlockHash]:
        """Every named block with its name; not to be written."""
        return self._hash_of

    @property
    def block_of(self) -> Mapping[BlockHash, int]:
        """Every name with its block; not to be written."""
        return self._block_of


class NoFreeBlock(Exception):
    """A block was allocated from an empty pool; callers look at `free` first, so this is a bug."""


class BlockPool:
    """Owns the reference count of each block, and the order in which free blocks are allocated again.

    A free block is blank (its contents are of no use) or cached (the index knows it). Blank ones are allocated first,
    then cached ones, the least recently used first; only then does the index forget them.
    """

    def __init__(self, total: int, index: PrefixIndex) -> None:
        self.total = total
        self.index = index
        self._references = [0] * total
        self._blank = list(range(total - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks without a reference, cached ones included."""
        return len(self._blank) + len(self._cached)

    def allocate(self) -> int:
        """A block for new contents, with one reference. Raises NoFreeBlock."""
        if self._blank:
            block = self._blank.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self.index.remove(block)
        else:
            raise NoFreeBlock(f"all {self.total} blocks are in use")
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a block that is in use, or that the index knows."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each; those released first are allocated again first. Raises ValueError for a block
        that has no reference."""
        references, holds = self._references, self.index.holds
        for block in blocks:
            references[block] -= 1
            if references[block] == 0:
                if holds(block):
                    self._cached[block] = None
                else:
                    self._blank.append(block)
            elif references[block] < 0:
                raise ValueError(f"block {block} was released more often than allocated")

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free at present."""
        return sum(1 for block in blocks if self._references[block] == 0)

    @property
    def references(self) -> Sequence[int]:
        """The count of each block, by its number; not to be written."""
        return self._references

    @property
    def blank(self) -> Sequence[int]:
        """Free blocks without contents; the last one is allocated first."""
        return self._blank

    @property
    def cached(self) -> KeysView[int]:
        """Free blocks that the index knows, the least recently used first."""
        return self._cached.keys()
