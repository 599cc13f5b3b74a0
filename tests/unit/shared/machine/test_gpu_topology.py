"""Matrices of `nvidia-smi topo -m`, recorded on machines of several kinds, and what CUDA_VISIBLE_DEVICES leaves."""

from __future__ import annotations

import pytest

from shared.machine.gpu_topology import NVLINK, TopologyError, parse_matrix, visible_gpus
from tests.support.gpu_matrices import DGX_H100, PAIRS, TWO_SOCKETS_PCIE

UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33")


def test_gpus_on_switches_are_all_joined() -> None:
    found = parse_matrix(DGX_H100)
    assert len(found) == 8
    assert found.nodes == (0, 0, 0, 0, 1, 1, 1, 1)
    assert {found.closeness(one, other) for one in range(8) for other in range(8) if one != other} == {NVLINK + 17}
    assert found.joint((0, 7)) == "NV18"


def test_pairs_with_a_bridge_are_closer_than_neighbours_on_a_socket() -> None:
    found = parse_matrix(PAIRS)
    assert found.nodes == (0, 0, 1, 1)
    assert found.closeness(0, 2) > found.closeness(0, 1) > found.closeness(0, 3)
    assert found.joint((0, 1, 2)) == "SYS"
    assert found.joint((0,)) == ""


def test_switches_and_sockets_are_told_apart() -> None:
    found = parse_matrix(TWO_SOCKETS_PCIE)
    assert found.nodes == (0, 0, 0, 0, 1, 1, 1, 1)
    order = [found.closeness(*pair) for pair in ((0, 1), (0, 2), (6, 7), (4, 6), (0, 4))]
    assert order == [5, 4, 3, 2, 1]


def test_only_some_gpus_in_another_order() -> None:
    some = parse_matrix(PAIRS).only((3, 1, 0))
    assert some.links == (("X", "NV4", "SYS"), ("NV4", "X", "NODE"), ("SYS", "NODE", "X"))
    assert some.nodes == (1, 0, 0)


def test_one_gpu_and_columns_that_are_missing() -> None:
    one = parse_matrix("\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\tN/A\t\tN/A\n")
    assert (one.links, one.nodes) == ((("X",),), (None,))
    assert parse_matrix("GPU0 GPU1\nGPU0 X PIX\nGPU1 PIX X").nodes == (None, None)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no line with GPU0"),
        ("no devices were found", "no line with GPU0"),
        ("\tGPU0\tGPU1\nGPU0\t X \tPIX\n", "2 GPUs are named, and 1 rows"),
        ("\tGPU0\tGPU1\nGPU0\t X \tFOO\nGPU1\tFOO\t X \n", "GPU0, GPU1: FOO is none of"),
        ("\tGPU0\tGPU1\nGPU0\t X \t X \nGPU1\tPIX\t X \n", "GPU0, GPU1: X is none of"),
    ],
)
def test_what_is_no_matrix_is_refused(text: str, named: str) -> None:
    with pytest.raises(TopologyError, match=named):
        parse_matrix(text)


@pytest.mark.parametrize(
    ("setting", "seen"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("", []),
        ("GPU-bb33,GPU-aa1", [2, 0]),
        ("GPU-aa", None),
        ("MIG-GPU-aa11/1/0", None),
        ("7", None),
        ("1,1", None),
        ("-1", None),
    ],
)
def test_visible_gpus_are_found_by_number_and_by_uuid(setting: str | None, seen: list[int] | None) -> None:
    assert visible_gpus(setting, UUIDS) == seen
