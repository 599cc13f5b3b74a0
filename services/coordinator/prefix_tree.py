"""The tree of the prompts that were placed last, by what they have in common, and who holds it: for people. Only ever a
part of each prompt is kept, by its hashes; nothing of its tokens."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from shared.blocks import HASH_BYTES
from shared.ids import InstanceId, ModelName
from shared.messages.generation import Generation

MAX_PROMPTS = 256
"""Prompts that are kept."""
MAX_BLOCKS = 128
"""Blocks of each of them."""
MAX_NODES = 40
"""Nodes that are shown: the heaviest, each behind its parent."""

Holders = Callable[[ModelName, bytes], Sequence[InstanceId]]
"""Who holds all blocks of a chain of packed hashes."""


class _PlacedPrompt(NamedTuple):
    model: ModelName
    chain: bytes
    """The packed hashes of its first blocks."""
    at: float


class PrefixNode(NamedTuple):
    """Blocks that some of the prompts have in common, behind those of the node's parent."""

    name: str
    """Of its last block, in hexadecimal."""
    parent: str | None
    model: ModelName
    first_token: int
    tokens: int
    """From its first to the first of its children."""
    requests: int
    held_by: tuple[InstanceId, ...]
    """Engines and KV stores that hold it whole, with all that is before it."""
    last_used: float
    """In Unix seconds."""


class _PrefixBranch(NamedTuple):
    """Prompts that are equal up to `end`, in the order of their chains; branches compare by weight."""

    weight: int
    """Requests times blocks, negative: the heaviest is the least."""
    number: int
    """Tells branches of one weight apart."""
    prompts: tuple[_PlacedPrompt, ...]
    start: int
    end: int
    """In bytes of the chain."""
    parent: str | None


class PrefixTree:
    """Owns the prompts that were placed last."""

    def __init__(self, block_size: int) -> None:
        """`block_size`: tokens of a block."""
        self._block_size = block_size
        self._prompts: deque[_PlacedPrompt] = deque(maxlen=MAX_PROMPTS)

    def record(self, generation: Generation, now: float) -> None:
        """A request was placed. `now`: Unix seconds."""
        chain = generation.block_hashes[: MAX_BLOCKS * HASH_BYTES]
        if generation.prefix_caching and len(chain) >= HASH_BYTES:
            self._prompts.append(_PlacedPrompt(generation.model, chain, now))

    def nodes(self, holders: Holders) -> list[PrefixNode]:
        """Returns the top of the tree: of all nodes whose parents are there the heaviest, by requests times blocks."""
        found: list[PrefixNode] = []
        frontier: list[_PrefixBranch] = list(self._branches(tuple(sorted(self._prompts)), 0, None, 0))
        heapq.heapify(frontier)
        made = len(frontier)
        while frontier and len(found) < MAX_NODES:
            branch = heapq.heappop(frontier)
            node = self._node(branch, holders)
            found.append(node)
            for child in self._branches(branch.prompts, branch.end, node.name, made):
                heapq.heappush(frontier, child)
                made += 1
        return found

    def _node(self, branch: _PrefixBranch, holders: Holders) -> PrefixNode:
        first = branch.prompts[0]
        return PrefixNode(
            name=first.chain[branch.end - HASH_BYTES : branch.end].hex(),
            parent=branch.parent,
            model=first.model,
            first_token=branch.start // HASH_BYTES * self._block_size,
            tokens=(branch.end - branch.start) // HASH_BYTES * self._block_size,
            requests=len(branch.prompts),
            held_by=tuple(sorted(holders(first.model, first.chain[: branch.end]))),
            last_used=max(prompt.at for prompt in branch.prompts),
        )

    def _branches(
        self, prompts: tuple[_PlacedPrompt, ...], start: int, parent: str | None, number: int
    ) -> Iterator[_PrefixBranch]:
        """What goes on behind `start`, by model and next block. `prompts` are equal up to there, and in order."""
        longer = (prompt for prompt in prompts if len(prompt.chain) > start)
        for _, group in groupby(longer, lambda prompt: (prompt.model, prompt.chain[start : start + HASH_BYTES])):
            alike = tuple(group)
            end = _common(alike[0].chain, alike[-1].chain, start)
            weight = -len(alike) * (end - start) // HASH_BYTES
            yield _PrefixBranch(weight, number, alike, start, end, parent)
            number += 1


def _common(one: bytes, other: bytes, known: int) -> int:
    """How many bytes of whole hashes two chains have in common, at least `known`. As of a sorted list the first and the
    last have in common what all have."""
    low, high = known // HASH_BYTES, min(len(one), len(other)) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[known : middle * HASH_BYTES] == other[known : middle * HASH_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low * HASH_BYTES
