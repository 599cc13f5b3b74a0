"""Who uses which block of KV memory: reference counts and the free list. Knows no sequences and no tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, KeysView, Sequence

from services.scheduler.core.prefix_index import PrefixIndex


class NoFreeBlock(Exception):
    """A block was taken from an empty pool; callers look at `free` first, so this is a bug."""


class BlockPool:
    """Owns the reference count of each block and the order in which free ones are taken again.

    A free block is blank (its contents are of no use) or cached (the index knows it). Blank ones are taken first,
    then cached ones, least recently used first; only then does the index forget them.
    """

    def __init__(self, total: int, index: PrefixIndex) -> None:
        self.total = total
        self.index = index
        self._references = [0] * total
        self._blank = list(range(total - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that no sequence uses, cached ones included."""
        return len(self._blank) + len(self._cached)

    def take(self) -> int:
        """A block for new contents, with one reference."""
        if self._blank:
            block = self._blank.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self.index.forget(block)
        else:
            raise NoFreeBlock(f"all {self.total} blocks are in use")
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a block that the index knows, free or in use."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """One reference less each; those given back first are taken again first."""
        references, holds = self._references, self.index.holds
        for block in blocks:
            references[block] -= 1
            if references[block] == 0:
                if holds(block):
                    self._cached[block] = None
                else:
                    self._blank.append(block)
            elif references[block] < 0:
                raise ValueError(f"block {block} was given back more often than taken")

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free at present."""
        return sum(1 for block in blocks if self._references[block] == 0)

    @property
    def references(self) -> Sequence[int]:
        return self._references

    @property
    def blank(self) -> Sequence[int]:
        return self._blank

    @property
    def cached(self) -> KeysView[int]:
        """Free blocks that the index knows, least recently used first."""
        return self._cached.keys()
