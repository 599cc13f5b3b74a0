"""NUMA nodes of machines of several kinds, as their sysfs was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.machine.numa import (
    CpuListError,
    NumaShare,
    allowed_cpus,
    compute_nodes,
    format_cpus,
    nodes_of,
    parse_cpus,
    read_nodes,
)
from tests.support.machine_trees import EPYC_NPS4, GIB, ONE_NODE, TWO_SOCKETS, WITH_CXL, write_machine


def test_two_sockets_are_two_nodes_with_half_of_everything(tmp_path: Path) -> None:
    first, second = read_nodes(write_machine(tmp_path, TWO_SOCKETS))
    assert (first.number, second.number) == (0, 1)
    assert first.cpus == frozenset((*range(32), *range(64, 96)))
    assert len(first.cpus | second.cpus) == 128
    assert first.memory == second.memory == 256 * GIB
    assert (first.distances, second.distances) == ((10, 21), (21, 10))


def test_nodes_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    nodes = read_nodes(write_machine(tmp_path, EPYC_NPS4 | {10: EPYC_NPS4[0]._replace(cpulist="300")}))
    assert [node.number for node in nodes] == [0, 1, 2, 3, 4, 5, 6, 7, 10]
    assert nodes[3].distances == (12, 12, 12, 10, 32, 32, 32, 32)


def test_a_node_of_memory_alone_has_no_processors(tmp_path: Path) -> None:
    nodes = read_nodes(write_machine(tmp_path, WITH_CXL))
    assert nodes[2].cpus == frozenset()
    assert nodes[2].memory == 256 * GIB
    assert [node.number for node in compute_nodes(nodes, frozenset(range(96)))] == [0, 1]
    assert nodes_of(frozenset({0, 47}), nodes) == [0]


def test_a_machine_of_one_node_and_one_that_says_nothing(tmp_path: Path) -> None:
    assert len(read_nodes(write_machine(tmp_path / "one", ONE_NODE))) == 1
    assert read_nodes(tmp_path / "nothing") == []


def test_a_node_that_nobody_may_read_is_left_out(tmp_path: Path) -> None:
    hidden = write_machine(tmp_path, TWO_SOCKETS) / "devices/system/node/node0/cpulist"
    hidden.unlink()
    hidden.mkdir()  # a root that runs tests may read everything else
    assert [node.number for node in read_nodes(tmp_path)] == [1]


def test_a_container_has_the_nodes_of_its_processors(tmp_path: Path) -> None:
    nodes = read_nodes(write_machine(tmp_path, TWO_SOCKETS))
    (only,) = compute_nodes(nodes, frozenset(range(8)))
    assert (only.number, only.cpus) == (0, frozenset(range(8)))


def test_a_share_is_an_even_part_and_splits_no_core(tmp_path: Path) -> None:
    nodes = read_nodes(write_machine(tmp_path, TWO_SOCKETS, threads_apart=64))
    first, second = (NumaShare((1,), part, 2).cpus(nodes, tmp_path) for part in range(2))
    assert first == frozenset((*range(32, 48), *range(96, 112)))
    assert second == frozenset((*range(48, 64), *range(112, 128)))
    assert NumaShare((0, 1)).cpus(nodes, tmp_path) == frozenset(range(128))
    assert NumaShare((5,)).cpus(nodes, tmp_path) is None
    assert NumaShare((0,), 1, 64).cpus(nodes, tmp_path) is not None
    assert NumaShare((0,), 0, 64).cpus(nodes, tmp_path) is None, "more parts than cores"


def test_a_share_is_written_and_read() -> None:
    for share, text in ((NumaShare((0,), 1, 2), "0:1/2"), (NumaShare((0, 1)), "0,1:0/1")):
        assert str(share) == text
        assert NumaShare.parse(text) == share
    for wrong in ("", "0", "0:1", "0:2/2", "0:0/0", "a:0/1", "0,:0/1"):
        with pytest.raises(ValueError, match="number of parts are expected"):
            NumaShare.parse(wrong)


def test_lists_of_processors_are_read_and_written_as_linux_does() -> None:
    assert parse_cpus("0-2,7\n") == {0, 1, 2, 7}
    assert parse_cpus("\n") == frozenset()
    assert format_cpus({9, 0, 1, 2, 7, 8}) == "0-2,7-9"
    assert format_cpus({4}) == "4"
    for wrong in ("a", "1-", "-1", "1-b"):
        with pytest.raises(CpuListError, match="is no list of processors"):
            parse_cpus(wrong)


def test_this_machine_is_read() -> None:
    """Whatever it is: each of our processors is on one node at most."""
    allowed = allowed_cpus()
    assert allowed is not None
    nodes = compute_nodes(read_nodes(), allowed)
    assert sum(len(node.cpus) for node in nodes) in (0, len(allowed))
