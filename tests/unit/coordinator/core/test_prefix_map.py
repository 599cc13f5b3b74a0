"""The map from block hashes to sources: runs along a chain, sources that go, the bound."""

from __future__ import annotations

import pytest

from services.coordinator.core.prefix_map import PrefixMap, PrefixRun, bits_of, keys_of

CHAIN = [10, 11, 12, 13]


def test_keys_are_one_for_each_whole_hash() -> None:
    assert len(keys_of(bytes(range(48)))) == 3
    assert len(keys_of(bytes(range(47)))) == 2
    assert len(keys_of(b"")) == 0
    assert len(set(keys_of(bytes(range(48))))) == 3


def test_a_run_ends_where_a_source_lacks_a_block() -> None:
    known = PrefixMap(100)
    short, long, none = known.open(), known.open(), known.open()
    known.add(short, CHAIN[:2])
    known.add(long, CHAIN)
    assert known.runs(short | long | none, CHAIN) == [PrefixRun(short, 2), PrefixRun(long, 4)]
    assert known.runs(short, CHAIN) == [PrefixRun(short, 2)]
    assert known.runs(short | long, [10, 99, 12]) == [PrefixRun(short | long, 1)]
    assert known.runs(short | long, []) == []


def test_what_is_held_behind_a_hole_is_no_run() -> None:
    known = PrefixMap(100)
    source = known.open()
    known.add(source, CHAIN)
    known.remove(source, [11])
    assert known.runs(source, CHAIN) == [PrefixRun(source, 1)]
    known.add(source, [11])
    assert known.runs(source, CHAIN) == [PrefixRun(source, 4)]


def test_a_retired_sources_bit_is_given_out_again_only_when_it_is_off_all_blocks() -> None:
    known = PrefixMap(1000)
    gone, stays = known.open(), known.open()
    known.add(gone, range(100))
    known.add(stays, range(50))
    known.retire(gone)
    known.tidy(99)
    assert known.open() not in (gone, stays)
    known.tidy(1)
    assert len(known) == 50
    again = known.open()
    assert again == gone
    assert known.runs(again | stays, [0, 1]) == [PrefixRun(stays, 2)]


def test_a_source_that_never_held_anything_needs_no_sweep() -> None:
    known = PrefixMap(100)
    known.retire(bit := known.open())
    assert known.open() == bit


def test_blocks_that_come_while_bits_are_swept_are_left_alone() -> None:
    known = PrefixMap(1000)
    gone, stays = known.open(), known.open()
    known.add(gone, range(10))
    known.retire(gone)
    known.tidy(5)
    known.add(stays, range(20))
    known.tidy(5)
    assert known.runs(stays, range(20)) == [PrefixRun(stays, 20)]
    assert known.open() == gone


def test_beyond_the_bound_what_nobody_asked_for_is_forgotten_first() -> None:
    known = PrefixMap(200)
    source = known.open()
    asked_for, not_asked_for = range(10), range(100, 110)
    known.add(source, asked_for)
    known.add(source, not_asked_for)
    for start in range(1000, 2000, 20):
        known.add(source, range(start, start + 20))
        assert known.runs(source, asked_for) == [PrefixRun(source, 10)]
        assert len(known) <= 220
    assert known.runs(source, not_asked_for) == []
    assert known.forgotten >= 700


def test_a_block_that_was_forgotten_may_be_removed_and_stored_again() -> None:
    known = PrefixMap(20)
    source = known.open()
    known.add(source, range(100))
    known.add(source, range(200, 220))
    known.remove(source, range(100))
    known.add(source, range(5))
    assert known.runs(source, range(5)) == [PrefixRun(source, 5)]


@pytest.mark.parametrize("mask", [0, 1, 6, 1 << 200 | 1])
def test_bits_add_up_to_their_mask(mask: int) -> None:
    assert sum(bits_of(mask)) == mask
    assert all(bit & (bit - 1) == 0 for bit in bits_of(mask))
