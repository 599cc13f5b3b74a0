"""Invariants of a store's bookkeeping, for tests: checking them looks at everything."""

from __future__ import annotations

from collections import Counter

from kvstore.core.slot_table import SlotState, SlotTable
from kvstore.core.store import StoreCore


def check(store: StoreCore, lent: int = 0) -> None:
    """Raises AssertionError where one does not hold. `lent`: pins that belong to no lease."""
    pins: Counter[int] = Counter()
    writing: Counter[int] = Counter()
    for lease in store.leases.all():
        pins.update(id(block) for block in lease.pinned)
        writing.update(id(block) for block in lease.reserved)
    for table in store.budget.tables.values():
        _check_slots(table)
        _check_chains(table)
        for block in table.blocks.values():
            assert writing.pop(id(block), 0) == (not block.committed), f"{block}: a block is written under one lease"
            leased = pins.pop(id(block), 0)
            assert leased <= block.pins <= leased + lent, f"{block}: pinned without a lease"
            assert block.pins or not (block.doomed and block.committed), f"{block}: of no use, unread, and still here"
    assert not pins, "leases pin blocks that are gone"
    assert not writing, "leases reserve blocks that are gone"
    headers = sum(table.fixed_bytes for table in store.budget.tables.values())
    assert store.budget.memory <= store.budget.total + headers, "a budget is kept, but for the headers of a new layout"


def _check_slots(table: SlotTable) -> None:
    """free (with memory, without, getting it) + reserved (resting, too) + committed == total, each slot once."""
    held = [block.slot for block in table.blocks.values()]
    slots = [*table.absent, *table.preparing, *table.free, *(resting.slot for resting in table.resting), *held]
    assert sorted(slots) == list(range(table.slots)), f"{table.layout}: a slot is lost, or somewhere twice"
    assert table.committed == sum(block.committed for block in table.blocks.values())
    for state, members in _slots_by_state(table).items():
        assert all(table.state(slot) is state for slot in members), f"{table.layout}: a slot is not {state.name}"
    assert table.pinned == sum(block.pins > 0 for block in table.blocks.values())


def _slots_by_state(table: SlotTable) -> dict[SlotState, list[int]]:
    return {
        SlotState.ABSENT: table.absent,
        SlotState.PREPARING: list(table.preparing),
        SlotState.FREE: table.free,
        SlotState.RESTING: [resting.slot for resting in table.resting],
        SlotState.RESERVED: [block.slot for block in table.blocks.values() if not block.committed],
        SlotState.COMMITTED: [block.slot for block in table.blocks.values() if block.committed],
    }


def _check_chains(table: SlotTable) -> None:
    assert table.children == Counter(block.parent for block in table.blocks.values()), "a child is forgotten"
    listed = set(table.leaves)
    for name, block in table.blocks.items():
        assert name == block.hash
        assert not table.is_evictable(block) or (block.used, name) in listed, f"{block}: nobody would ever evict it"
