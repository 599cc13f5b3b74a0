"""Blocks of layers that see different tokens: which are given back, which are found again, and what fits."""

from __future__ import annotations

import pytest

from services.scheduler.core.hybrid_memory import GroupedPrefixIndex, HybridBlockAllocator, name_in
from services.scheduler.core.sequence import QueueKey, Sequence
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.kv_groups import NULL_BLOCK, KvCacheGroup
from tests.support.engines.checking_worker import generate

FULL, WINDOW = KvCacheGroup(layers=2), KvCacheGroup(layers=2, window=20)
STEP = 32


def memory(blocks: int = 100, *groups: KvCacheGroup) -> HybridBlockAllocator:
    return HybridBlockAllocator(blocks, BLOCK_SIZE, groups or (FULL, WINDOW), STEP)


def sequence(length: int, name: str = "a") -> Sequence:
    return Sequence(generate(name, [7] * length), QueueKey(0, 0.0, 1), 1000, frozenset(), BLOCK_SIZE)


def compute(blocks: HybridBlockAllocator, member: Sequence) -> None:
    """All its known tokens, a step at a time."""
    blocks.adopt(member, [])
    while member.tokens.planned < member.tokens.length:
        blocks.reclaim(member)
        end = min(member.tokens.length, member.tokens.planned + STEP)
        blocks.grow(member, end)
        member.tokens.set_planned(end)
        blocks.index_full_blocks(member)
    blocks.reclaim(member)


def index_of(blocks: HybridBlockAllocator) -> GroupedPrefixIndex:
    assert isinstance(blocks.index, GroupedPrefixIndex)
    return blocks.index


def table(member: Sequence, group: int, groups: int = 2) -> list[bool]:
    """For each of its blocks whether the group has one."""
    return [block != NULL_BLOCK for block in member.blocks.numbers[group::groups]]


def test_a_window_gives_back_what_lies_behind_it() -> None:
    """Position 99 is computed again at most: it sees 80 and those behind, the sixth block on."""
    blocks, member = memory(), sequence(100)
    compute(blocks, member)
    assert table(member, 0) == [True] * 7
    assert table(member, 1) == [False] * 5 + [True] * 2
    assert blocks.pool.free == 100 - 1 - 7 - 2
    blocks.release(member)
    assert blocks.pool.free == 99, "all but the null block"


def test_no_sequence_has_more_than_was_counted_on() -> None:
    blocks, member = memory(), sequence(400)
    most = sum(group.most_blocks(400, BLOCK_SIZE, STEP) for group in (FULL, WINDOW))
    blocks.adopt(member, [])
    while member.tokens.planned < 400:
        blocks.reclaim(member)
        blocks.grow(member, min(400, member.tokens.planned + STEP))
        member.tokens.set_planned(min(400, member.tokens.planned + STEP))
        assert 99 - blocks.pool.free <= most


def test_a_prefix_is_found_where_every_group_can_go_on() -> None:
    blocks, member = memory(), sequence(100)
    compute(blocks, member)
    blocks.release(member)
    again = sequence(100, "b")
    cached = blocks.cached_blocks(again)
    assert len(cached) == 6
    blocks.adopt(again, cached)
    assert again.tokens.planned == 96
    assert table(again, 0) == [True] * 6
    assert table(again, 1) == [False] * 4 + [True] * 2, "position 96 sees 77 and those behind"


def test_a_shorter_prefix_counts_where_a_window_has_lost_its_last_blocks() -> None:
    """Its sixth block is somebody else's by now: those before are still there for who stops earlier."""
    blocks, member = memory(), sequence(100)
    compute(blocks, member)
    blocks.release(member)
    lost = index_of(blocks).of_others[name_in(1, member.tokens.hashes[5])]
    blocks.pool.cached.move_to_end(lost, last=False)
    while blocks.pool.blank:
        blocks.pool.allocate()
    assert blocks.pool.allocate() == lost
    assert len(blocks.cached_blocks(sequence(100, "b"))) == 5
    assert len(blocks.cached_blocks(sequence(40, "c"))) == 2


def test_a_whole_block_that_is_lost_ends_every_prefix_there() -> None:
    blocks, member = memory(), sequence(100)
    compute(blocks, member)
    blocks.release(member)
    blocks.index.remove(blocks.index.block_of[member.tokens.hashes[2]])
    assert len(blocks.cached_blocks(sequence(100, "b"))) == 2


def test_what_fits_counts_a_window_once() -> None:
    """7 blocks for all of 100 tokens, and at most 5 for the window of 20 before a step of 32."""
    assert memory(1 + 7 + 5).fits(sequence(100), [], [], 0)
    assert not memory(7 + 5).fits(sequence(100), [], [], 0)
    assert not memory(1 + 7 + 5).fits(sequence(100), [], [], 1)


def test_a_sequence_that_is_being_computed_keeps_its_room() -> None:
    blocks, member = memory(1 + 12 + 12), sequence(100)
    blocks.adopt(member, [])
    blocks.grow(member, STEP)
    member.tokens.set_planned(STEP)
    assert blocks.fits(sequence(100, "b"), [], [member], 0)
    assert not blocks.fits(sequence(100, "b"), [], [member], 1)


def test_windows_alone_hold_any_length() -> None:
    blocks, member = memory(1 + 5, WINDOW), sequence(600)
    assert blocks.fits(member, [], [], 0)
    compute(blocks, member)
    assert sum(table(member, 0, 1)) == 2


@pytest.mark.parametrize("group", [0, 1])
def test_a_block_has_one_name(group: int) -> None:
    blocks, member = memory(), sequence(16)
    compute(blocks, member)
    with pytest.raises(ValueError, match="is indexed already"):
        index_of(blocks).add_to(group, member.tokens.hashes[0], member.blocks.numbers[group])
