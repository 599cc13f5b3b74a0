"""Which of a host's devices the ranks of an engine compute on: GPUs that are close to each other.

Joined by NVLink, then on one NUMA node, then the rest; of equals those whose loss leaves the others closest together,
then the lowest. Devices are numbers: device d is GPU d modulo the number of GPUs, so that engines share GPUs where
there are too few.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations, count
from math import comb
from typing import NamedTuple

from deploy.supervisor.core.members import first_free
from shared.machine.gpu_topology import MIN_SAME_NODE, NVLINK, GpuTopology

MAX_GROUPS = 20_000
"""Above so many possible groups one is grown GPU by GPU, from each GPU in turn."""


class _GroupRank(NamedTuple):
    """How good a group is; the least is the best."""

    unjoined: int
    """Pairs that no NVLink joins."""
    apart: int
    """Pairs on two NUMA nodes."""
    distance: int
    """The closeness of all pairs, below 0."""
    lost: int
    """The closeness of its GPUs to those that are left."""
    gpus: tuple[int, ...]


def choose_devices(
    taken: Collection[int | None], ranks: int, topology: GpuTopology | None, *, stages: int = 1
) -> list[int]:
    """A device for each rank of an engine, none of which is in `taken`; the ranks of a pipeline stage, which follow
    each other, get those that are closest. Without a topology, and for more ranks than GPUs: the lowest numbers in a
    row. GPUs with the fewest ranks of other engines come first."""
    gpus = 0 if topology is None else len(topology)
    if topology is None or ranks > gpus:
        first = first_free(taken, ranks)
        return list(range(first, first + ranks))
    users = [sum(device is not None and device % gpus == gpu for device in taken) for gpu in range(gpus)]
    fewest = sorted(users)[ranks - 1] if ranks else 0
    certain = [gpu for gpu in range(gpus) if users[gpu] < fewest]
    possible = [gpu for gpu in range(gpus) if users[gpu] == fewest]
    group = _closest(topology, certain, possible, ranks)
    return [_device(gpu, gpus, taken) for gpu in _in_stages(topology, group, stages)]


def _device(gpu: int, gpus: int, taken: Collection[int | None]) -> int:
    """The lowest number of that GPU that is free."""
    return next(device for device in count(gpu, gpus) if device not in taken)


def _in_stages(topology: GpuTopology, group: Sequence[int], stages: int) -> list[int]:
    """The GPUs of a group, those of one stage after the other."""
    left, ordered = list(group), list[int]()
    for _ in range(stages):
        stage = _closest(topology, [], left, len(group) // stages)
        ordered += stage
        left = [gpu for gpu in left if gpu not in stage]
    return ordered + left


def _closest(topology: GpuTopology, certain: Sequence[int], possible: Sequence[int], size: int) -> list[int]:
    """The best group of that size with all of `certain`, and others of `possible`; by number."""
    missing = size - len(certain)
    if missing <= 0:
        return sorted(certain)[:size]
    if comb(len(possible), missing) <= MAX_GROUPS:
        groups = (sorted((*certain, *others)) for others in combinations(possible, missing))
    else:
        seeds = [list(certain)] if certain else [[gpu] for gpu in possible]
        groups = (_grown(topology, seed, possible, size) for seed in seeds)
    return list(min(_rank(topology, group, possible) for group in groups).gpus)


def _grown(topology: GpuTopology, seed: Sequence[int], possible: Sequence[int], size: int) -> list[int]:
    """A group from a seed, by the GPU that is closest to those before."""
    group = list(seed)
    while len(group) < size:
        others = [gpu for gpu in possible if gpu not in group]
        group.append(max(others, key=lambda gpu: (sum(topology.closeness(gpu, each) for each in group), -gpu)))
    return sorted(group)


def _rank(topology: GpuTopology, group: Sequence[int], possible: Sequence[int]) -> _GroupRank:
    pairs = [topology.closeness(one, other) for one, other in combinations(group, 2)]
    left = [gpu for gpu in possible if gpu not in group]
    return _GroupRank(
        unjoined=sum(each < NVLINK for each in pairs),
        apart=sum(each < MIN_SAME_NODE for each in pairs),
        distance=-sum(pairs),
        lost=sum(topology.closeness(gpu, other) for gpu in group for other in left),
        gpus=tuple(group),
    )
