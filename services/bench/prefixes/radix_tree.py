"""A compressed prefix tree over prompts that counts how many of them went through each of its nodes.

A prompt is a `str` here whatever it is made of, one code point for each symbol (character, word or token id): Python's
most compact array, compared and cut at memory speed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from services.bench.statistics import mean, percentile


class Node:
    """`visits` prompts hold `label` behind what is above."""

    __slots__ = ("children", "label", "visits")

    def __init__(self, label: str, visits: int, children: dict[str, Node] | None = None) -> None:
        self.label = label
        self.visits = visits
        self.children = children
        """By the first symbol of their labels; None for none, as for nearly all nodes."""


class SharedPrefix(NamedTuple):
    """The beginning of several prompts: its length in symbols, how many prompts have it, and the symbols."""

    length: int
    visits: int
    text: str


class RadixTree:
    """Owns the nodes. Holds every prompt's symbols once; `forget` bounds that."""

    def __init__(self) -> None:
        self.root = Node("", 0, {})
        self.stored = 0
        """Symbols in all labels."""

    def insert(self, prompt: str) -> int:
        """Counts a prompt in; answers how many of its leading symbols an earlier prompt had, all in the same order."""
        node, at = self.root, 0
        node.visits += 1
        while at < len(prompt):
            children = node.children
            child = children.get(prompt[at]) if children else None
            if child is None:
                self._add_leaf(node, prompt[at:])
                return at
            shared = _common(child.label, prompt, at)
            if shared < len(child.label):
                assert children is not None
                child = children[prompt[at]] = _split(child, shared)
            child.visits += 1
            node, at = child, at + shared
        return at

    def _add_leaf(self, node: Node, label: str) -> None:
        if node.children is None:
            node.children = {}
        node.children[label[0]] = Node(label, 1)
        self.stored += len(label)

    def shared_symbols(self) -> int:
        """Symbols of all prompts that another prompt has too, behind the same ones."""
        total, open_ = 0, [self.root]
        while open_:
            for child in (open_.pop().children or {}).values():
                if child.visits > 1:
                    total += child.visits * len(child.label)
                    open_.append(child)
        return total

    def shared_prefixes(self, min_visits: int, min_length: int) -> list[SharedPrefix]:
        """The leaves that remain when nodes of fewer than `min_visits` visits are cut off, where the path to them is
        longer than `min_length`; the most visited first. No prompt goes through two of them."""
        found: list[SharedPrefix] = []
        open_ = [(self.root, "")]
        while open_:
            node, path = open_.pop()
            kept = [child for child in (node.children or {}).values() if child.visits >= min_visits]
            open_ += [(child, path + child.label) for child in kept]
            if not kept and len(path) > min_length:
                found.append(SharedPrefix(len(path), node.visits, path))
        return sorted(found, key=lambda prefix: (-prefix.visits, -prefix.length, prefix.text))

    def behind(self, min_visits: int, min_length: int) -> int:
        """How many prompts have a beginning longer than `min_length` in common with enough others."""
        total, open_ = 0, [(self.root, 0)]
        while open_:
            node, length = open_.pop()
            for child in (node.children or {}).values():
                reached = length + len(child.label)
                if child.visits >= min_visits and reached > min_length:
                    total += child.visits
                elif child.visits >= min_visits:
                    open_.append((child, reached))
        return total

    def forget(self) -> int:
        """Drops the tails that only one prompt has; answers how many. What comes later and has such a tail will be
        taken for new, so that figures from here on are lower bounds."""
        dropped, open_ = 0, [self.root]
        while open_:
            node = open_.pop()
            for symbol, child in list((node.children or {}).items()):
                if child.visits > 1:
                    open_.append(child)
                else:
                    assert node.children is not None
                    assert not child.children, "whoever parts the ways of a prompt is its second visitor"
                    del node.children[symbol]
                    dropped, self.stored = dropped + 1, self.stored - len(child.label)
        return dropped


def _split(node: Node, at: int) -> Node:
    """Cuts `node`'s label; answers the upper part, with the lower one below."""
    upper = Node(node.label[:at], node.visits, {node.label[at]: node})
    node.label = node.label[at:]
    return upper


def _common(label: str, prompt: str, at: int) -> int:
    """How many leading symbols of `label` are in `prompt` from `at` on; the first one is known to be."""
    if prompt.startswith(label, at):
        return len(label)
    low, high = 1, min(len(label), len(prompt) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if label[low:middle] == prompt[at + low : at + middle]:
            low = middle
        else:
            high = middle - 1
    return low


# How much a set of prompts repeats its beginnings: the figures, as the literature defines them.
#
# - Ideal hit rate: prompt tokens that an earlier prompt began with, of all prompt tokens; what a prefix cache without
# limits reaches when prompts come in this order (SGLang: Zheng et al., NeurIPS 2024; "theoretical hit rate" of traces).
# In whole blocks as well, as engines with paged memory keep them.
# - Shared tokens: those that any other prompt has too, the first one's own included (Preble: Srivatsa et al., ICLR
# 2025).
# - Shared prefixes: the tree of all prompts is pruned below N visits; its leaves longer than L are the shared prefixes.
# Their share is that of the prompts that go through one; leaves lie apart, so none counts twice. Where many prompts
# leave a path before its leaf, the share of prompts that go through any remaining node longer than L says more.


PERCENTS = (10, 50, 90, 99)


class PrefixCount:
    """Owns the tree of all prompts so far, and what each of them repeated."""

    def __init__(self, block_size: int, max_stored: int) -> None:
        self.tree = RadixTree()
        self.repeated = array("Q")
        """For each prompt, how many leading symbols an earlier prompt had, too."""
        self.symbols = self.in_blocks = self.forgotten = 0
        self._block_size, self._max_stored = block_size, max_stored

    def add(self, prompt: str) -> None:
        """Counts one more prompt, given as symbols."""
        repeated = self.tree.insert(prompt)
        self.repeated.append(repeated)
        self.symbols += len(prompt)
        self.in_blocks += repeated - repeated % self._block_size
        if self.tree.stored > self._max_stored:
            self.forgotten += self.tree.forget()

    def figures(self, min_visits: int, min_length: int) -> tuple[dict[str, Any], list[SharedPrefix]]:
        """All of them, and the shared prefixes that some are about. Shares are of 1."""
        prefixes = self.tree.shared_prefixes(min_visits, min_length)
        figures = self._repetition() | self._sharing(prefixes)
        behind = self.tree.behind(min_visits, min_length) / max(1, len(self.repeated))
        return figures | {"min_visits": min_visits, "min_length": min_length, "behind_any_share": behind}, prefixes

    def _repetition(self) -> dict[str, Any]:
        prompts, symbols = max(1, len(self.repeated)), max(1, self.symbols)
        return {
            "prompts": len(self.repeated),
            "total_length": self.symbols,
            "mean_prompt_length": self.symbols / prompts,
            "ideal_hit_rate": sum(self.repeated) / symbols,
            "block_size": self._block_size,
            "ideal_hit_rate_in_blocks": self.in_blocks / symbols,
            "shared_share": self.tree.shared_symbols() / symbols,
            "repeated_beginning": distribution(self.repeated),
            "forgotten_prompts": self.forgotten,
        }

    def _sharing(self, prefixes: Sequence[SharedPrefix]) -> dict[str, Any]:
        prompts, symbols = max(1, len(self.repeated)), max(1, self.symbols)
        return {
            "shared_prefixes": len(prefixes),
            "prompt_share": sum(prefix.visits for prefix in prefixes) / prompts,
            "covered_share": sum(prefix.visits * prefix.length for prefix in prefixes) / symbols,
            "prefix_length": distribution([prefix.length for prefix in prefixes]),
            "prefix_visits": distribution([prefix.visits for prefix in prefixes]),
        }


def distribution(values: Sequence[int]) -> dict[str, float] | None:
    """None where there are no values."""
    if not values:
        return None
    middle = {f"p{percent}": percentile(values, percent) for percent in PERCENTS}
    return {"min": min(values), "mean": mean(values), **middle, "max": max(values)}
