"""Every slot is in one state, and enters only those that may follow it."""

from __future__ import annotations

import pytest

from kvstore.core.slot_table import TRANSITIONS, SlotState, SlotTable, StoredBlock
from shared.blocks import BlockHash
from shared.reliability.transitions import IllegalTransition

ROOT = BlockHash(bytes(16))


def block(slot: int, name: bytes = b"a", *, committed: bool = False) -> StoredBlock:
    return StoredBlock(BlockHash(name * 16), ROOT, 16, slot, committed=committed)


def table() -> SlotTable:
    return SlotTable("layout", slots=4, block_bytes=4096, fixed_bytes=64, block_size=16)


def put(slots: SlotTable, one: StoredBlock) -> StoredBlock:
    slots.expect_child(one.parent)
    slots.put(one)
    return one


def test_the_life_of_a_slot() -> None:
    slots = table()
    slot = slots.start_preparing()
    assert slots.state(slot) is SlotState.PREPARING
    slots.finish_preparing(slot, taken=True)
    assert slots.reserve_free() == slot
    one = put(slots, block(slot))
    slots.commit(one, used=1, now=0.0)
    assert (slots.state(slot), slots.committed) == (SlotState.COMMITTED, 1)
    slots.free_block(one)
    assert slots.give_back() == slot
    assert (slots.state(slot), slots.memory) == (SlotState.ABSENT, 64)


def test_a_slot_whose_writers_are_lost_rests_until_it_is_free() -> None:
    slots = table()
    one = put(slots, block(slots.reserve_absent()))
    slots.rest_block(one, until=10.0)
    assert (slots.end_rests(9.9), slots.reserved) == ([], 1)
    assert slots.end_rests(10.0) == [one.slot]
    assert slots.state(one.slot) is SlotState.FREE


def test_memory_that_is_not_to_be_had_leaves_the_slot_absent() -> None:
    slots = table()
    one = put(slots, block(slots.reserve_absent()))
    slots.unreserve(one)
    slots.finish_preparing(slots.start_preparing(), taken=False)
    assert sorted(slots.absent) == [0, 1, 2, 3]


def test_an_illegal_step_is_raised_with_what_came_before() -> None:
    slots = table()
    one = put(slots, block(slots.reserve_absent()))
    slots.commit(one, used=1, now=0.0)
    with pytest.raises(IllegalTransition, match="slot 0: absent → reserved → committed → committed"):
        slots.commit(one, used=2, now=0.0)
    with pytest.raises(IllegalTransition, match="committed → resting"):
        slots.rest(one.slot, until=1.0)
    assert slots.state(one.slot) is SlotState.COMMITTED


def test_what_a_former_store_left_is_committed_or_rests() -> None:
    slots = table()
    slots.recover([block(2, committed=True)], [0], until=5.0)
    assert [slots.state(slot).name for slot in range(4)] == ["RESTING", "ABSENT", "COMMITTED", "ABSENT"]
    assert sorted(slots.absent) == [1, 3]


def test_every_state_can_be_entered_and_left() -> None:
    assert set(TRANSITIONS) == set(SlotState)
    assert set().union(*TRANSITIONS.values()) == set(SlotState)
    assert all(TRANSITIONS.values())
