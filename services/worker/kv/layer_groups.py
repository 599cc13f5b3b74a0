"""Which layers share block tables, and which share memory: one pool of equal blocks for layers of different kinds.

After vLLM's hybrid KV cache manager: layers that see the same tokens are cut into groups of as many layers as the
rarest kind has. Layers at the same place in their groups share one cache, in which each block is of one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

from shared.messages.kv_groups import KvCacheGroup

HybridKvCache = Literal["auto", "on", "off"]
"""Whether layers of different kinds have block tables of their own; auto: where nothing stands against it."""

MAX_GROUPS = 16
"""Each has a block table of every sequence."""
NEARLY_EQUAL = 1.25
"""Kinds whose numbers of layers differ by no more than this factor become one group each: some memory stays unused."""


class LayerGroups(NamedTuple):
    """The groups of a model's layers, one that sees all tokens first; the two below have an entry for each layer."""

    groups: tuple[KvCacheGroup, ...]
    group_of: tuple[int, ...]
    cache_of: tuple[int, ...]
    """Which of the caches it has; layers of one group have different ones."""

    @property
    def caches(self) -> int:
        """Number of caches: layers of the largest group."""
        return max(self.cache_of) + 1

    def digest(self, model: str) -> str:
        """What tells the keys and values of a model, of digest `model`, in these groups from those in any others."""
        return blake2b(f"{model} {self}".encode(), digest_size=len(model) // 2 or 1).hexdigest()


def group_layers(windows: Sequence[int | None], max_model_len: int) -> LayerGroups | None:
    """Groups of layers with these windows, in positions; None: all. None where every layer sees all tokens of a
    sequence: then there is nothing to give back."""
    seen = [None if window is None or window >= max_model_len else window for window in windows]
    kinds = sorted(set(seen), key=lambda window: (window is not None, window))
    if kinds == [None]:
        return None
    counts = [seen.count(kind) for kind in kinds]
    size = max(counts) if max(counts) <= NEARLY_EQUAL * min(counts) else min(counts)
    while sum(-(-count // size) for count in counts) > MAX_GROUPS:
        size += 1
    groups, group_of, cache_of = list[KvCacheGroup](), [0] * len(seen), [0] * len(seen)
    for kind in kinds:
        members = [number for number, window in enumerate(seen) if window == kind]
        for first in range(0, len(members), size):
            part = members[first : first + size]
            for place, number in enumerate(part):
                group_of[number], cache_of[number] = len(groups), place
            groups.append(KvCacheGroup(layers=len(part), window=kind))
    return LayerGroups(tuple(groups), tuple(group_of), tuple(cache_of))


def why_one_group(*, device: str, stages: int, drafts: str | None, connector: bool) -> str | None:
    """Why layers must have one block table; None: they need not. `drafts`: the method of speculation."""
    if device != "cpu":
        return f"groups of layers are not supported on {device}"
    if stages > 1:
        return "a pipeline's stages have different layers"
    if drafts not in (None, "ngram"):
        return f"drafts by {drafts} have keys and values in the same blocks"
    if connector:
        return "a KV connector knows one block for all layers"
    return None
