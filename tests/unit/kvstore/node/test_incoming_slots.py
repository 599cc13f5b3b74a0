"""Blocks from another node are received into slots of the arena: committed when they have come, given up if not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.arena.in_flight_block import InFlightBlock, checksum
from kvstore.core.layout import CHECKSUM, PAGE
from kvstore.node.incoming_slots import IncomingSlots
from kvstore.node.node_store import NodeStore
from kvstore.transfer.interface import BlockName
from shared.blocks import BlockHash
from tests.support.kv.arenas import Client, Clock, chain, contents, new_directory, parents_of, remove, store_in
from tests.support.kv.store_invariants import check

FIVE_BLOCKS = 7 * PAGE
NAMES = chain("landing", 6)
BLOCKS = [BlockName(name, BlockHash(parent), 16) for name, parent in zip(NAMES, parents_of(NAMES), strict=True)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[NodeStore]:
    directory = new_directory()
    made = store_in(directory, FIVE_BLOCKS, clock)
    yield made
    check(made.core)
    made.close()
    remove(directory)


def received(block: BlockName, view: memoryview, client: Client) -> InFlightBlock:
    """As a transport fills the slot."""
    shape = client.arena.geometry
    cells = [contents(block.hash, cell, shape.cell_bytes) for cell in range(shape.cells)]
    view[:] = b"".join(cells)
    sums = b"".join(CHECKSUM.pack(checksum(cell)) for cell in cells)
    return InFlightBlock(block.hash, block.parent, block.tokens, sums, view)


def test_what_was_received_into_its_slot_is_found_there(store: NodeStore) -> None:
    client = Client(store)
    with IncomingSlots(store, client.layout) as room:
        views = room.reserve(BLOCKS[:3])
        assert client.found(NAMES[:3]) == 0
        for block, view in zip(BLOCKS, views, strict=False):
            assert view is not None
            assert len(view) == client.arena.geometry.payload_bytes
            assert room.land(received(block, view, client))
    assert client.found(NAMES) == 3


def test_what_did_not_come_is_given_up_and_its_slot_free_at_once(store: NodeStore) -> None:
    client = Client(store)
    with IncomingSlots(store, client.layout) as room:
        [view, *_] = room.reserve(BLOCKS[:3])
        assert view is not None
        assert room.land(received(BLOCKS[0], view, client))
        assert store.report().reserved == 2
    assert (store.report().reserved, store.report().committed) == (0, 1)
    assert client.found(NAMES[:2]) == 1


def test_there_is_no_memory_for_what_is_here_and_no_more_than_the_arena_has(store: NodeStore) -> None:
    client = Client(store)
    client.save(NAMES[:1])
    with IncomingSlots(store, client.layout) as room:
        views = room.reserve(BLOCKS)
        assert views[0] is None
        # The block that is here is not pushed out by those that follow it.
        assert 0 < len(views) < len(BLOCKS)


def test_a_block_of_more_tokens_than_blocks_have_finds_no_room(store: NodeStore) -> None:
    client = Client(store)
    with IncomingSlots(store, client.layout) as room:
        assert room.reserve([BLOCKS[0]._replace(tokens=17)]) == []


def test_a_block_whose_lease_has_run_out_is_not_committed(store: NodeStore, clock: Clock) -> None:
    client = Client(store)
    with IncomingSlots(store, client.layout) as room:
        [view] = room.reserve(BLOCKS[:1])
        assert view is not None
        clock.now += room.seconds
        store.time_passed()
        assert store.report().reserved == 1, "it may be written to for so long"
        clock.now += 10.0 - room.seconds
        store.time_passed()
        assert not room.land(received(BLOCKS[0], view, client))
    assert client.found(NAMES[:1]) == 0


def test_a_block_in_other_memory_is_copied(store: NodeStore) -> None:
    client = Client(store)
    with IncomingSlots(store, client.layout) as room:
        elsewhere = memoryview(bytearray(client.arena.geometry.payload_bytes))
        assert room.land(received(BLOCKS[0], elsewhere, client))
        elsewhere[:] = bytes(len(elsewhere))
    assert client.found(NAMES[:1]) == 1
