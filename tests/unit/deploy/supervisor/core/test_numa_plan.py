"""Engines on processors are spread over NUMA nodes, one on each where there are as many."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deploy.supervisor.core.numa_plan import share_of
from deploy.supervisor.core.plan import Counts, all_process_specs, process_specs


def shares(counts: Counts, nodes: Sequence[int]) -> list[str]:
    """Of all workers of the start, in their order."""
    found = [share_of(process, counts, nodes) for process in all_process_specs(counts) if process.service == "worker"]
    return [str(share) for share in found]


@pytest.mark.parametrize(
    ("counts", "nodes", "expected"),
    [
        (Counts(engines=2), (0, 1), ["0:0/1", "1:0/1"]),
        (Counts(engines=4), (0, 1), ["0:0/2", "1:0/2", "0:1/2", "1:1/2"]),
        (Counts(engines=3), (0, 1), ["0:0/2", "1:0/1", "0:1/2"]),
        (Counts(engines=8), tuple(range(8)), [f"{node}:0/1" for node in range(8)]),
        (Counts(engines=2), (0, 3), ["0:0/1", "3:0/1"]),
        (Counts(engines=2, ranks=2), (0, 1), ["0:0/2", "0:1/2", "1:0/2", "1:1/2"]),
        (Counts(engines=0, prefill=1, decode=1), (0, 1), ["0:0/1", "1:0/1"]),
        (Counts(engines=0, prefill=1, decode=2, decode_ranks=2), (0, 1), ["0:0/3", "1:0/2", "1:1/2", "0:1/3", "0:2/3"]),
    ],
)
def test_engines_take_nodes_in_turn_and_divide_them_evenly(
    counts: Counts, nodes: Sequence[int], expected: list[str]
) -> None:
    assert shares(counts, nodes) == expected


@pytest.mark.parametrize(
    ("counts", "nodes", "expected"),
    [
        (Counts(engines=1), (0, 1), ["0,1:0/1"]),
        (Counts(engines=1, ranks=2), (0, 1), ["0:0/1", "1:0/1"]),
        (Counts(engines=1, ranks=4), (0, 1), ["0:0/2", "0:1/2", "1:0/2", "1:1/2"]),
        (Counts(engines=2), tuple(range(8)), ["0,1,2,3:0/1", "4,5,6,7:0/1"]),
        (Counts(engines=2, ranks=4), tuple(range(8)), [f"{node}:0/1" for node in range(8)]),
        (Counts(engines=1, ranks=3), (0, 1), ["0:0/2", "0:1/2", "1:0/1"]),
    ],
)
def test_with_fewer_engines_than_nodes_each_has_several_and_its_ranks_divide_them(
    counts: Counts, nodes: Sequence[int], expected: list[str]
) -> None:
    assert shares(counts, nodes) == expected


def test_on_one_node_nothing_is_said() -> None:
    for nodes in ((), (0,)):
        assert shares(Counts(engines=2), nodes) == ["None", "None"]


def test_only_ranks_have_shares() -> None:
    others = [process for process in all_process_specs(Counts(kvstore=1)) if process.service != "worker"]
    assert {share_of(process, Counts(kvstore=1), (0, 1)) for process in others} == {None}


@pytest.mark.parametrize("engines", [1, 2])
def test_an_engine_that_comes_later_shares_the_node_that_is_its_turn(engines: int) -> None:
    counts = Counts(engines=engines)
    added = [process_specs("engines", number, counts)[1] for number in (engines + 1, engines + 2)]
    assert [str(share_of(process, counts, (0, 1))) for process in added] == ["0:0/1", "1:0/1"]


def test_one_that_stands_by_has_a_share_of_its_own() -> None:
    counts = Counts(engines=1, standby=1)
    standing_by = process_specs("engines", 2, counts)[1]
    assert [str(share_of(each, counts, (0, 1))) for each in (process_specs("engines", 1, counts)[1], standing_by)] == [
        "0:0/1",
        "1:0/1",
    ]
    pools = Counts(engines=0, prefill=1, decode=1, standby=1)
    workers = [process_specs(pool, number, pools)[1] for pool in ("prefill", "decode") for number in (1, 2)]
    assert [str(share_of(each, pools, (0, 1))) for each in workers] == ["0:0/2", "1:0/2", "0:1/2", "1:1/2"]
