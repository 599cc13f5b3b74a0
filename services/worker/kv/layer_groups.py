"""Which layers share block tables, and which share memory: one pool of equal blocks for layers of different kinds.

After vLLM's hybrid KV cache manager: layers that see the same tokens are cut into groups of as many layers as the
rarest kind has. Layers at the same place in their groups share one cache, in which each block is of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar

from shared.kv_groups import KvCacheGroup

_C = TypeVar("_C")
"""A layer's cache."""

HybridKvCache = Literal["auto", "on", "off"]
"""Whether layers of different kinds have block tables of their own; auto: where nothing stands against it."""

MAX_GROUPS = 16
"""Each has a block table of every sequence."""
NEARLY_EQUAL = 1.25
"""Kinds whose numbers of layers differ by no more than this factor become one group each: some memory stays unused."""


class LayerGroups(NamedTuple):
    """The groups of a model's layers, one that sees all tokens first, and how one pipeline stage has them; the two
    below have an entry for each layer of the stage."""

    groups: tuple[KvCacheGroup, ...]
    """Of all stages together."""
    group_of: tuple[int, ...]
    cache_of: tuple[int, ...]
    """Which of the stage's caches it has; layers of one group have different ones."""
    stages: tuple[int, ...]
    """Caches of each stage: its layers of the largest group."""
    stage: int

    @property
    def caches(self) -> int:
        """Number of this stage's caches."""
        return self.stages[self.stage]

    @property
    def first_cache(self) -> int:
        """Number of caches of the stages before."""
        return sum(self.stages[: self.stage])

    def digest(self, model: str) -> str:
        """What tells the keys and values of a model, of digest `model`, in these groups from those in any others; the
        same on all stages. Beside rows of an encoder's, which are nobody else's, those of tokens lie layer by layer,
        however a model is cut into stages."""
        own, *others = self.groups
        if any(each.encoded is not None for each in others) and own.layers == sum(self.stages):
            return model
        told = f"{model} {self.groups} {self.stages}"
        return blake2b(told.encode(), digest_size=len(model) // 2 or 1).hexdigest()


def group_layers(
    windows: Sequence[int | None], max_model_len: int, stages: Sequence[int] = (), stage: int = 0
) -> LayerGroups | None:
    """Groups of a model's layers with these windows, in positions; None: all. `stages`: how many layers each has, as
    many as there are; empty: all are of one. None where every layer sees all tokens of a sequence: then there is
    nothing to give back.

    All stages have as many groups of a kind as the one that needs most, because they share block tables; a stage may
    have no layer of some group.
    """
    seen = [None if window is None or window >= max_model_len else window for window in windows]
    kinds = sorted(set(seen), key=lambda window: (window is not None, window))
    if kinds == [None]:
        return None
    parts = _parts(seen, stages or (len(seen),))
    counts = [[part.count(kind) for kind in kinds] for part in parts]
    numbers = _groups_of_kinds(counts)
    sizes = [max(-(-count // number) for count, number in zip(each, numbers, strict=True)) for each in counts]
    members = [_members(part, kinds, numbers, size) for part, size in zip(parts, sizes, strict=True)]
    of_kinds = [kind for kind, number in zip(kinds, numbers, strict=True) for _ in range(number)]
    groups = [
        KvCacheGroup(layers=sum(len(each[number]) for each in members), window=kind)
        for number, kind in enumerate(of_kinds)
    ]
    group_of, cache_of = [0] * len(parts[stage]), [0] * len(parts[stage])
    for number, layers in enumerate(members[stage]):
        for place, layer in enumerate(layers):
            group_of[layer], cache_of[layer] = number, place
    return LayerGroups(tuple(groups), tuple(group_of), tuple(cache_of), tuple(sizes), stage)


def encoded_layers(across: Sequence[Sequence[bool]], stage: int, rows: int) -> LayerGroups:
    """Groups of a model's attentions, each either to the sequence's own tokens or across, to an encoder's `rows`, as
    `across` says of each stage. A layer across has as many caches as there are for each of them, from `cache_of` on:
    those of the first layers of tokens belong to the first one across, too, and so on."""
    counts = [(len(each) - sum(each), sum(each)) for each in across]
    parts = min(max(1, own // others) for own, others in counts if others)
    group_of = tuple(int(each) for each in across[stage])
    cache_of = tuple((parts if group else 1) * group_of[:at].count(group) for at, group in enumerate(group_of))
    own, others = (sum(each) for each in zip(*counts, strict=True))
    groups = KvCacheGroup(layers=own), KvCacheGroup(layers=others, encoded=rows, parts=parts)
    return LayerGroups(groups, group_of, cache_of, tuple(max(each) for each in counts), stage)


def _parts(seen: list[int | None], stages: Sequence[int]) -> list[list[int | None]]:
    ends = list(accumulate(stages))
    return [seen[end - size : end] for size, end in zip(stages, ends, strict=True)]


def _groups_of_kinds(counts: list[list[int]]) -> list[int]:
    """How many groups there are of each kind; `counts`: layers of each kind on each stage."""
    sizes = [_group_size([count for count in each if count]) for each in counts]
    while True:
        pairs = list(zip(counts, sizes, strict=True))
        numbers = [max(-(-each[kind] // size) for each, size in pairs) for kind in range(len(counts[0]))]
        if sum(numbers) <= MAX_GROUPS:
            return numbers
        sizes = [size + 1 for size in sizes]


def _group_size(counts: list[int]) -> int:
    """Layers of the rarest kind, or of the most frequent where that is little more."""
    return max(counts) if max(counts) <= NEARLY_EQUAL * min(counts) else min(counts)


def _members(part: list[int | None], kinds: Sequence[int | None], numbers: list[int], size: int) -> list[list[int]]:
    """The layers of a stage in each group, at most `size`."""
    members: list[list[int]] = []
    for kind, number in zip(kinds, numbers, strict=True):
        layers = [layer for layer, window in enumerate(part) if window == kind]
        members += [layers[first * size : (first + 1) * size] for first in range(number)]
    return members


_DRAFTS_WITH_CACHES = ("draft", "eagle", "eagle3", "mtp")
"""Methods that keep keys and values of all tokens in blocks of the first group."""


def why_one_group(
    groups: LayerGroups, *, device: str, drafts: str | None, trees: bool = False, connector: bool
) -> str | None:
    """Why layers must have one block table; None: they need not. `drafts`: the method of speculation; `trees`: whether
    it drafts any."""
    if device != "cpu":
        return f"groups of layers are not supported on {device}"
    if drafts in _DRAFTS_WITH_CACHES and groups.groups[0].window is not None:
        return f"drafts by {drafts} see all tokens, and no layer of the model does"
    if trees:
        return "branches of trees of drafts (speculative_eagle_topk) have one block for all layers"
    if connector:
        return "a KV connector knows one block for all layers"
    return None


def allocate_caches(layers: int, groups: LayerGroups | None, allocate: Callable[[], _C]) -> list[_C]:
    """A cache for each layer, which those at the same place in their `groups` share; None: no layers share any."""
    if groups is None:
        return [allocate() for _ in range(layers)]
    shared = [allocate() for _ in range(groups.caches)]
    return [shared[number] for number in groups.cache_of]


def distinct(caches: list[_C]) -> list[_C]:
    """Each cache once, however many layers share it."""
    return list({id(cache): cache for cache in caches}.values())
