"""Blocks that a store keeps for a later request: for longer than leases last, and no more than a share of its slots."""

from __future__ import annotations

from kvstore.core.leases import LeaseKey
from kvstore.core.slot_table import SlotTable
from kvstore.core.store import KEPT_SHARE, BlockToWrite, StoreCore
from shared.blocks import BlockHash
from shared.ids import Incarnation, InstanceId, LeaseId
from shared.messages.kvstore import KEEP_SECONDS, LeaseOwner

OWNER = LeaseOwner(InstanceId("engine"), Incarnation(1))
LEASE_SECONDS = 10.0
SLOTS = 16


def key(number: int) -> LeaseKey:
    return LeaseKey("l", OWNER, LeaseId(number))


def block(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 16)


def store_with(*blocks: int) -> tuple[StoreCore, SlotTable]:
    store = StoreCore(2**30, LEASE_SECONDS)
    table = SlotTable("l", SLOTS, 64, 0, 16)
    store.add(table)
    slots, _ = store.reserve(key(0), [BlockToWrite(block(each), BlockHash(bytes(16)), 16) for each in blocks], 0.0)
    store.commit(key(0), [slot.number for slot in slots if slot is not None], 0.0)
    return store, table


def test_what_is_kept_outlives_leases_and_runs_out_by_itself() -> None:
    store, table = store_with(1, 2)
    found, _ = store.keep(key(1), [block(1), block(2)], 0.0)
    store.find(key(2), [block(1)], 0.0)
    assert (len(found), table.pinned) == (2, 2)
    store.time_passed(LEASE_SECONDS + 1)
    assert table.pinned == 2
    store.time_passed(KEEP_SECONDS - 1)
    assert table.pinned == 2
    store.time_passed(KEEP_SECONDS + 1)
    assert table.pinned == 0


def test_its_release_and_its_owners_end_are_its_end() -> None:
    store, table = store_with(1)
    store.keep(key(1), [block(1)], 0.0)
    store.release(key(1), 1.0)
    assert table.pinned == 0
    store.keep(key(2), [block(1)], 1.0)
    store.owner_gone(OWNER, 2.0)
    assert table.pinned == 0


def test_no_more_than_a_share_of_the_slots_is_kept() -> None:
    most = SLOTS // KEPT_SHARE
    store, table = store_with(*range(1, most + 2))
    assert store.keep(key(1), [block(each) for each in range(1, most + 1)], 0.0)[0]
    assert store.keep(key(2), [block(most + 1)], 0.0) == ([], [])
    assert table.pinned == most
    store.release(key(1), 1.0)
    assert store.keep(key(3), [block(most + 1)], 1.0)[0]
