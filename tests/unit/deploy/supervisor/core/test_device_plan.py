"""Ranks of an engine get GPUs that are close to each other, on machines whose matrices were recorded."""

from __future__ import annotations

import pytest

from deploy.supervisor.core.device_plan import choose_devices
from deploy.supervisor.core.plan import Counts
from deploy.supervisor.core.supervisor import Supervisor
from shared.machine.gpu_topology import GpuTopology, parse_matrix
from tests.support.gpu_matrices import DGX_H100, PAIRS, TWO_SOCKETS_PCIE


def engines(topology: GpuTopology | None, *ranks: int, stages: int = 1) -> list[list[int]]:
    """The devices of engines that are started one after the other."""
    taken: set[int] = set()
    found = []
    for each in ranks:
        devices = choose_devices(taken, each, topology, stages=stages)
        assert not taken & set(devices)
        taken |= set(devices)
        found.append(devices)
    return found


def test_two_ranks_get_gpus_that_an_nvlink_joins() -> None:
    assert engines(parse_matrix(PAIRS), 2, 2) == [[0, 2], [1, 3]]


def test_single_ranks_break_no_pair_that_is_whole() -> None:
    assert engines(parse_matrix(PAIRS), 1, 1, 2) == [[0], [2], [1, 3]]


def test_without_nvlink_ranks_stay_on_one_node_and_below_one_switch() -> None:
    pcie = parse_matrix(TWO_SOCKETS_PCIE)
    assert engines(pcie, 4, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert engines(pcie, 2, 2, 2, 2) == [[4, 5], [0, 1], [2, 3], [6, 7]], "the best four stay together at first"
    assert engines(pcie, 1, 4, 2) == [[6], [0, 1, 2, 3], [4, 5]]


def test_where_no_node_has_enough_the_closest_of_the_rest_are_taken() -> None:
    pcie = parse_matrix(TWO_SOCKETS_PCIE)
    assert choose_devices({0, 4}, 4, pcie) == [1, 2, 3, 5]
    assert choose_devices(set(), 8, pcie) == list(range(8))


def test_where_all_are_alike_the_lowest_come_first() -> None:
    assert engines(parse_matrix(DGX_H100), 2, 4, 1, 1) == [[0, 1], [2, 3, 4, 5], [6], [7]]


def test_the_ranks_of_a_stage_are_the_closest() -> None:
    assert engines(parse_matrix(PAIRS), 4, stages=2) == [[0, 2, 1, 3]]
    assert engines(parse_matrix(PAIRS), 4, stages=4) == [[0, 2, 1, 3]]


def test_engines_share_gpus_where_there_are_too_few_and_ranks_of_one_engine_never_do() -> None:
    found = engines(parse_matrix(PAIRS), 2, 1, 2, 2, 2)
    assert found[:2] == [[0, 2], [1]]
    for devices in found:
        assert len({device % 4 for device in devices}) == len(devices)
    users = [sum(device % 4 == gpu for devices in found for device in devices) for gpu in range(4)]
    assert max(users) - min(users) <= 1


def test_without_a_matrix_devices_are_in_the_order_of_their_numbers() -> None:
    assert engines(None, 2, 1, 2) == [[0, 1], [2], [3, 4]]
    assert engines(parse_matrix(PAIRS), 5) == [[0, 1, 2, 3, 4]], "the worker says that these are too many"


@pytest.mark.parametrize("size", [2, 8, 36])
def test_large_machines_are_answered_at_once(size: int) -> None:
    """72 GPUs, of which 36 and 36 hang together."""
    links = tuple(
        tuple("X" if one == other else "NV18" if one % 2 == other % 2 else "SYS" for other in range(72))
        for one in range(72)
    )
    devices = choose_devices({0, 1}, size if size < 36 else 35, GpuTopology(links, (None,) * 72))
    assert len({device % 2 for device in devices}) == 1


def test_the_supervisor_places_engines_so_and_an_engine_that_comes_later_too() -> None:
    supervisor = Supervisor(Counts(engines=2, ranks=2), gpus=parse_matrix(PAIRS))
    devices = {member.process.instance: member.device for member in supervisor.members() if member.device is not None}
    assert devices == {"engine-1-rank0": 0, "engine-1-rank1": 2, "engine-2-rank0": 1, "engine-2-rank1": 3}
