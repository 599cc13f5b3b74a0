"""What is chosen by the machine: NUMA nodes for engines, and how GPUs are joined."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cli.up import machine
from deploy.cli.up.machine import gpu_choice, numa_choice
from deploy.errors import CommandError
from deploy.supervisor.settings import StackSettings
from shared.machine.gpu_topology import GpuTopology
from shared.machine.numa import NumaNode
from tests.support.gpu_matrices import PAIRS

PAIR = GpuTopology((("X", "NV4"), ("NV4", "X")), (0, 0))


def test_engines_are_spread_over_numa_nodes_unless_it_was_said_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [NumaNode(0, frozenset({0}), 1), NumaNode(1, frozenset({1}), 1), NumaNode(2, frozenset(), 1)]
    monkeypatch.setattr(machine, "read_nodes", lambda: nodes)
    monkeypatch.setattr(machine, "allowed_cpus", lambda: frozenset({0, 1}))
    assert numa_choice({}, {}) == (0, 1)
    assert numa_choice({"numa": "bind"}, {}) == (0, 1)
    for values, assigned in (
        ({"numa": "off"}, {}),
        ({"bind": "none"}, {}),
        ({}, {"worker": {"threads": "2"}}),
        ({}, {"worker": {"bind": "0-1"}}),
    ):
        assert numa_choice(values, assigned) == ()
    monkeypatch.setattr(machine, "allowed_cpus", lambda: frozenset({1}))
    assert numa_choice({}, {}) == (), "a container on one node"


def test_gpus_are_asked_for_where_engines_may_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_topology", lambda visible, ordered_by_bus: PAIR)
    for device in ({}, {"device": "cuda"}, {"device": "auto"}):
        assert gpu_choice(StackSettings(), device, {}) == PAIR
    for values, assigned in (({"device": "cpu"}, {}), ({}, {"worker": {"device": "sim"}})):
        assert gpu_choice(StackSettings(), values, assigned) is None
    assert gpu_choice(StackSettings(gpu_topology="off"), {}, {}) is None


def test_a_recorded_matrix_takes_the_drivers_place(tmp_path: Path) -> None:
    file = tmp_path / "topology.txt"
    file.write_text(PAIRS)
    found = gpu_choice(StackSettings(gpu_topology=str(file)), {"device": "sim"}, {})
    assert found is not None
    assert len(found) == 4


@pytest.mark.parametrize(
    ("text", "named"), [(None, "No such file"), (b"\xff\xfe", "it is no text"), (b"GPU0 GPU1\n", "2 GPUs are named")]
)
def test_a_file_that_is_no_matrix_is_named(tmp_path: Path, text: bytes | None, named: str) -> None:
    file = tmp_path / "topology.txt"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(CommandError, match=rf"--gpu-topology .*topology\.txt: {named}"):
        gpu_choice(StackSettings(gpu_topology=str(file)), {}, {})
