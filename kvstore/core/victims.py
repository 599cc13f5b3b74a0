"""Which blocks would have to make room next, while nothing has to yet. Changes nothing."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from kvstore.core.shelf import Block, Shelf
from shared.blocks import BlockHash


def next_victims(shelves: Iterable[Shelf]) -> Iterator[tuple[Shelf, Block]]:
    """In the order in which they would go, were none of them used meanwhile. Takes as long as what is taken from it."""

    def of(shelf: Shelf) -> Iterator[tuple[Shelf, Block]]:
        return ((shelf, block) for block in _victims(shelf))

    return heapq.merge(*map(of, shelves), key=lambda entry: entry[1].used)


def _victims(shelf: Shelf) -> Iterator[Block]:
    """Walks the heap of leaves from its top without taking it apart; a parent follows the last of its children."""
    leaves = shelf.leaves
    gone: set[BlockHash] = set()
    children_gone: Counter[BlockHash] = Counter()
    # Entries of the heap with their places; whatever lies beyond its end has no entries below it.
    ahead = [(entry, 0) for entry in leaves[:1]]
    while ahead:
        (used, name), place = heapq.heappop(ahead)
        for below in (2 * place + 1, 2 * place + 2):
            if below < len(leaves):
                heapq.heappush(ahead, (leaves[below], below))
        block = shelf.blocks.get(name)
        if block is None or block.used != used or name in gone or not _would_go(shelf, block, children_gone):
            continue
        gone.add(name)
        yield block
        children_gone[block.parent] += 1
        parent = shelf.blocks.get(block.parent)
        if parent is not None and _would_go(shelf, parent, children_gone):
            heapq.heappush(ahead, ((parent.used, parent.hash), len(leaves)))


def _would_go(shelf: Shelf, block: Block, children_gone: Counter[BlockHash]) -> bool:
    childless = shelf.children.get(block.hash, 0) == children_gone[block.hash]
    return block.committed and not block.pins and childless
