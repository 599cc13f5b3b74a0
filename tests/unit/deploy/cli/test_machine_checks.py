"""What `baton doctor` says of memory nodes and of the links between GPUs, on machines that were recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cli import machine_checks
from shared.machine.gpu_topology import GpuTopology, parse_matrix
from shared.machine.numa import read_nodes
from tests.support.gpu_matrices import PAIRS
from tests.support.machine_trees import ONE_NODE, TWO_SOCKETS, WITH_CXL, NodeTree, write_machine


def said(
    monkeypatch: pytest.MonkeyPatch, tree: dict[int, NodeTree], folder: Path, gpus: GpuTopology | None = None
) -> list[str]:
    nodes = read_nodes(write_machine(folder, tree))
    monkeypatch.setattr(machine_checks, "read_nodes", lambda: nodes)
    monkeypatch.setattr(machine_checks, "gpus_here", lambda: gpus)
    placed = {"engine-1-rank0": frozenset(range(32)), "engine-2-rank0": frozenset({0, 33})}
    return machine_checks.numa(placed).detail.splitlines()


def test_nodes_have_processors_memory_and_gpus_and_ranks_have_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert said(monkeypatch, TWO_SOCKETS, tmp_path, parse_matrix(PAIRS)) == [
        "2 nodes, over which engines without GPUs are spread (--numa)",
        "node 0: 64 processors (0-31,64-95), 256.0 GiB, GPU 0, GPU 1",
        "node 1: 64 processors (32-63,96-127), 256.0 GiB, GPU 2, GPU 3",
        "engine-1-rank0: node 0, processors 0-31",
        "engine-2-rank0: nodes 0, 1, processors 0,33",
    ]


def test_memory_alone_and_one_node_and_none_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "node 2: memory only, 256.0 GiB" in said(monkeypatch, WITH_CXL, tmp_path / "cxl")
    assert said(monkeypatch, ONE_NODE, tmp_path / "one") == ["one node: nothing to spread"]
    assert said(monkeypatch, {}, tmp_path / "none") == ["the system shows no nodes"]


def test_links_of_gpus_and_which_of_them_an_engine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "gpus_here", lambda: None)
    found = machine_checks.gpu_links(parse_matrix(PAIRS), {"engine-1": [0, 2], "engine-2": [5], "engine-3": [4, 1]})
    assert found.detail.splitlines() == [
        "4 GPUs",
        "GPU 0: X NODE NV4 SYS, node 0",
        "GPU 1: NODE X SYS NV4, node 0",
        "GPU 2: NV4 SYS X NODE, node 1",
        "GPU 3: SYS NV4 NODE X, node 1",
        "engine-1: GPU 0, 2, joined by NV4",
        "engine-2: GPU 1",
        "engine-3: GPU 0, 1, joined by NODE",
    ]
    assert machine_checks.gpu_links(None, {}).detail.startswith("not known")
