"""Which NUMA nodes the ranks of each engine get, where they compute on processors: engines are spread over the nodes.

With as many engines as nodes, or more, each has a node, or an even part of one; with fewer each has several, which are
divided between its ranks. One rank on several nodes has all their processors, and memory on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deploy.supervisor.core.plan import POOLS, Counts, Pool, ProcessSpec
from shared.machine.numa import NumaShare


class _PlannedEngine(NamedTuple):
    pool: Pool
    number: int
    """In its pool, from 1."""
    ranks: int
    """On this host."""


def share_of(process: ProcessSpec, counts: Counts, nodes: Sequence[int]) -> NumaShare | None:
    """What a rank gets; None for other services, and on a machine of one node. `nodes`: the numbers of those with
    processors. An engine that was added later shares the node that is its turn with those that have it."""
    if process.rank is None or process.pool is None or len(nodes) < 2:
        return None
    engines = _engines(counts)
    ranks_here = counts.ranks_here(process.pool)
    engine = _PlannedEngine(process.pool, process.number, len(ranks_here))
    rank = process.rank - ranks_here.start
    if len(engines) < len(nodes):
        if engine in engines:
            return _of_several(engine, rank, _part_of(nodes, engines.index(engine), len(engines)))
        return NumaShare((nodes[_turn(engine, engines) % len(nodes)],), rank, engine.ranks)
    turn = _turn(engine, engines)
    beside = engines[turn % len(nodes) :: len(nodes)]
    node = nodes[turn % len(nodes)]
    if engine not in beside:
        return NumaShare((node,), rank, engine.ranks)
    before = sum(each.ranks for each in beside[: beside.index(engine)])
    return NumaShare((node,), before + rank, sum(each.ranks for each in beside))


def _engines(counts: Counts) -> list[_PlannedEngine]:
    """Those of the stack's start, those that stand by included."""
    found = []
    for pool in POOLS:
        number = counts.of(pool) + counts.standby_of(pool)
        found += [_PlannedEngine(pool, each + 1, len(counts.ranks_here(pool))) for each in range(number)]
    return found


def _turn(engine: _PlannedEngine, engines: Sequence[_PlannedEngine]) -> int:
    """When it is its turn to get a node; of one that came later, behind all others."""
    return engines.index(engine) if engine in engines else len(engines) + engine.number - 1


def _of_several(engine: _PlannedEngine, rank: int, nodes: Sequence[int]) -> NumaShare:
    """A rank's share of its engine's nodes."""
    if engine.ranks <= len(nodes):
        return NumaShare(tuple(_part_of(nodes, rank, engine.ranks)))
    place = rank * len(nodes) // engine.ranks
    beside = [each for each in range(engine.ranks) if each * len(nodes) // engine.ranks == place]
    return NumaShare((nodes[place],), beside.index(rank), len(beside))


def _part_of(nodes: Sequence[int], number: int, count: int) -> Sequence[int]:
    """The `number`-th of `count` runs of neighbouring nodes, as even as may be."""
    return nodes[number * len(nodes) // count : (number + 1) * len(nodes) // count]
