"""The radix tree of prompts against the definitions, computed the slow way."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.prefixes.radix_tree import Node, PrefixCount, RadixTree, SharedPrefix

PROMPTS = st.lists(st.text("ab", max_size=9) | st.text("abc\U0010ffff\ud800", max_size=30), max_size=25)


def common(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def repeated(prompts: list[str]) -> list[int]:
    """By definition: the longest beginning that some earlier prompt has."""
    return [max((common(prompt, earlier) for earlier in prompts[:i]), default=0) for i, prompt in enumerate(prompts)]


def beginnings(prompts: list[str]) -> Counter[str]:
    """How many prompts begin with each string that any begins with."""
    return Counter(prompt[:length] for prompt in prompts for length in range(1, len(prompt) + 1))


def shared(prompts: list[str], min_visits: int, min_length: int) -> list[SharedPrefix]:
    """Beginnings of enough prompts that no longer beginning of enough prompts goes on from."""
    enough = {text: visits for text, visits in beginnings(prompts).items() if visits >= min_visits}
    last = [text for text in enough if not any(other.startswith(text) and other != text for other in enough)]
    found = [SharedPrefix(len(text), enough[text], text) for text in last if len(text) > min_length]
    return sorted(found, key=lambda prefix: (-prefix.visits, -prefix.length, prefix.text))


def check(tree: RadixTree) -> None:
    """No label is empty, each begins as its parent expects, none that goes on could be joined to what it goes on to
    unless a prompt ends there, and visits only ever become fewer."""

    def below(node: Node) -> int:
        children = node.children or {}
        assert all(symbol == child.label[0] for symbol, child in children.items())
        assert sum(child.visits for child in children.values()) <= node.visits
        if node is not tree.root and len(children) == 1:
            assert next(iter(children.values())).visits < node.visits
        return len(node.label) + sum(below(child) for child in children.values())

    assert below(tree.root) == tree.stored


@given(PROMPTS)
def test_what_a_prompt_repeats_is_its_longest_beginning_of_an_earlier_one(prompts: list[str]) -> None:
    tree = RadixTree()
    assert [tree.insert(prompt) for prompt in prompts] == repeated(prompts)
    assert tree.root.visits == len(prompts)
    check(tree)


@given(PROMPTS, st.integers(1, 4), st.integers(0, 5))
def test_shared_prefixes_are_the_last_beginnings_of_enough_prompts(
    prompts: list[str], min_visits: int, min_length: int
) -> None:
    tree = RadixTree()
    for prompt in prompts:
        tree.insert(prompt)
    found = tree.shared_prefixes(min_visits, min_length)
    assert found == shared(prompts, min_visits, min_length)
    counted = beginnings(prompts)
    behind = sum(len(prompt) > min_length and counted[prompt[: min_length + 1]] >= min_visits for prompt in prompts)
    assert sum(prefix.visits for prefix in found) <= tree.behind(min_visits, min_length) == behind


@given(PROMPTS)
def test_shared_symbols_are_those_that_another_prompt_has_too(prompts: list[str]) -> None:
    tree = RadixTree()
    for prompt in prompts:
        tree.insert(prompt)
    expected = sum(
        max((common(prompt, other) for j, other in enumerate(prompts) if j != i), default=0)
        for i, prompt in enumerate(prompts)
    )
    assert tree.shared_symbols() == expected


@given(PROMPTS, st.integers(1, 5))
def test_the_hit_rate_in_blocks_counts_whole_blocks(prompts: list[str], block_size: int) -> None:
    count = PrefixCount(block_size, 10**9)
    for prompt in prompts:
        count.add(prompt)
    figures, _ = count.figures(2, 1)
    tokens = max(1, sum(map(len, prompts)))
    assert figures["ideal_hit_rate"] == pytest.approx(sum(repeated(prompts)) / tokens)
    in_blocks = sum(length // block_size * block_size for length in repeated(prompts))
    assert figures["ideal_hit_rate_in_blocks"] == pytest.approx(in_blocks / tokens)


@given(PROMPTS, st.integers(0, 30))
def test_forgetting_bounds_memory_and_only_ever_counts_too_little(prompts: list[str], max_stored: int) -> None:
    count = PrefixCount(1, max_stored)
    for i, prompt in enumerate(prompts):
        count.add(prompt)
        assert count.repeated[i] <= repeated(prompts[: i + 1])[i]
        check_bound(count, max_stored)
    assert count.forgotten > 0 or list(count.repeated) == repeated(prompts)


def check_bound(count: PrefixCount, max_stored: int) -> None:
    """Beyond the limit there is nothing that only one prompt had."""
    if count.tree.stored > max_stored:
        open_ = [count.tree.root]
        while open_:
            children = (open_.pop().children or {}).values()
            assert all(child.visits > 1 for child in children)
            open_ += children
