"""What always holds of a store's bookkeeping. For tests: it looks at everything."""

from __future__ import annotations

from collections import Counter

from kvstore.core.shelf import Shelf
from kvstore.core.store import Store


def check(store: Store, lent: int = 0) -> None:
    """Raises AssertionError. `lent` pins belong to no lease."""
    pins: Counter[int] = Counter()
    writing: Counter[int] = Counter()
    for lease in store.leases.all():
        pins.update(id(block) for block in lease.pinned)
        writing.update(id(block) for block in lease.reserved)
    for shelf in store.room.shelves.values():
        _check_slots(shelf)
        _check_chains(shelf)
        for block in shelf.blocks.values():
            assert writing.pop(id(block), 0) == (not block.committed), f"{block}: a block is written under one lease"
            leased = pins.pop(id(block), 0)
            assert leased <= block.pins <= leased + lent, f"{block}: pinned without a lease"
            assert block.pins or not block.doomed, f"{block}: of no use and nobody reads it, and still here"
    assert not pins, "leases pin blocks that are gone"
    assert not writing, "leases reserve blocks that are gone"
    headers = sum(shelf.fixed_bytes for shelf in store.room.shelves.values())
    assert store.room.memory <= store.room.budget + headers, "a budget is kept, but for the headers of a new layout"


def _check_slots(shelf: Shelf) -> None:
    """free (with memory, without, getting it) + reserved (resting, too) + committed == total, each slot once."""
    held = [block.slot for block in shelf.blocks.values()]
    slots = [*shelf.absent, *shelf.preparing, *shelf.free, *(resting.slot for resting in shelf.resting), *held]
    assert sorted(slots) == list(range(shelf.slots)), f"{shelf.layout}: a slot is lost, or somewhere twice"
    assert shelf.committed == sum(block.committed for block in shelf.blocks.values())
    assert shelf.pinned == sum(block.pins > 0 for block in shelf.blocks.values())


def _check_chains(shelf: Shelf) -> None:
    assert shelf.children == Counter(block.parent for block in shelf.blocks.values()), "a child is forgotten"
    listed = set(shelf.leaves)
    for name, block in shelf.blocks.items():
        assert name == block.hash
        assert not shelf.evictable(block) or (block.used, name) in listed, f"{block}: nobody would ever evict it"
