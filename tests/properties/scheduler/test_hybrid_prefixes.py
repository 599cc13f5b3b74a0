"""Whatever groups of layers have lost of their blocks: the prefix that is found is the longest that each can go on
from, and nothing that anybody holds is given away."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.hybrid_memory import GroupedPrefixIndex, HybridBlockAllocator, name_in
from services.scheduler.core.sequence import QueueKey, Sequence
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.blocks import blocks_for
from shared.kv_groups import NULL_BLOCK, KvCacheGroup, most_blocks
from tests.support.engines.checking_worker import generate

BLOCKS, STEP = 60, 40
FULL = KvCacheGroup(layers=2)
GROUPS = (
    (FULL, KvCacheGroup(layers=2, window=20)),
    (FULL, KvCacheGroup(layers=2, window=1), KvCacheGroup(layers=1, window=33)),
    (KvCacheGroup(layers=2, window=17),),
    (KvCacheGroup(layers=2, window=16), KvCacheGroup(layers=2, window=50)),
)

prompts = st.tuples(st.integers(0, 1), st.integers(1, 120))
"""Which opening, and how many tokens of it."""


def sequence(prompt: tuple[int, int], number: int) -> Sequence:
    opening, length = prompt
    tokens = [opening * 100 + i % 90 for i in range(length)]
    return Sequence(generate(f"r{number}", tokens), QueueKey(0, 0.0, number), 1000, frozenset(), BLOCK_SIZE)


def longest(memory: HybridBlockAllocator, groups: tuple[KvCacheGroup, ...], member: Sequence) -> int:
    """The longest prefix, tried one after the other."""
    assert isinstance(memory.index, GroupedPrefixIndex)
    hashes, find = member.tokens.hashes, memory.index.find
    for count in range(member.reusable_blocks, 0, -1):
        first = [group.first_needed(count * BLOCK_SIZE, BLOCK_SIZE) for group in groups]
        needed = [name_in(number, name) for number, begin in enumerate(first) for name in hashes[begin:count]]
        if None not in map(find, needed):
            return count
    return 0


@given(st.sampled_from(GROUPS), st.lists(st.tuples(prompts, st.booleans()), min_size=2, max_size=14))
def test_the_longest_prefix_is_found(
    groups: tuple[KvCacheGroup, ...], events: list[tuple[tuple[int, int], bool]]
) -> None:
    memory = HybridBlockAllocator(BLOCKS, BLOCK_SIZE, groups, STEP)
    running: list[Sequence] = []
    for number, (prompt, stays) in enumerate(events):
        member = sequence(prompt, number)
        cached = memory.cached_blocks(member)
        assert len(cached) == longest(memory, groups, member)
        while running and not memory.fits(member, cached, [], 0):
            memory.release(running.pop(0))
            cached = memory.cached_blocks(member)
        assert memory.fits(member, cached, [], 0), "nobody else holds anything"
        compute(memory, member, cached, groups)
        if stays:
            running.append(member)
        else:
            memory.release(member)
        counts = [0] * BLOCKS
        for block in memory.blocks_in_use(running):
            counts[block] += 1
        assert counts == memory.pool.references
        assert memory.index.is_consistent


def compute(
    memory: HybridBlockAllocator, member: Sequence, cached: list[int], groups: tuple[KvCacheGroup, ...]
) -> None:
    """All its tokens in steps, each of which finds what it reads in its tables."""
    memory.adopt(member, cached)
    while (begin := member.tokens.planned) < member.tokens.length:
        memory.reclaim(member)
        end = min(member.tokens.length, begin + STEP)
        memory.grow(member, end)
        for number, group in enumerate(groups):
            table = member.blocks.numbers[number :: len(groups)]
            assert len(table) == blocks_for(end, BLOCK_SIZE)
            assert NULL_BLOCK not in table[group.first_needed(begin, BLOCK_SIZE) :]
        held = sum(block != NULL_BLOCK for block in member.blocks.numbers)
        assert held <= most_blocks(groups, member.tokens.length, BLOCK_SIZE, STEP)
        member.tokens.set_planned(end)
        memory.index_full_blocks(member)
