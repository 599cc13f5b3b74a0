"""A host whose kernel shows two NUMA nodes: real engines are spread over them, and the doctor says so."""

from __future__ import annotations

import os

import pytest

from shared.machine.numa import format_cpus
from tests.support.cluster.conversations import QUESTIONS
from tests.support.cluster.namespace_hosts import START_DEADLINE, Hosts, Streams
from tests.support.gpu_matrices import PAIRS
from tests.support.machine_trees import GIB, NodeTree, write_machine


@pytest.mark.timeout(600)
def test_engines_have_a_node_each_and_serve(hosts: Hosts) -> None:
    """The second node has processors of this machine and no memory of its own: the kernel refuses it as a place for
    memory, which is borne with."""
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        pytest.skip("two processors are needed")
    trees = {0: NodeTree(str(first), 8 * GIB, "10 21"), 1: NodeTree(format_cpus(others), 8 * GIB, "21 10")}
    host, matrix = hosts["numa"], hosts.folder / "topology.txt"
    host.show_nodes(write_machine(hosts.folder / "sysfs", trees))
    matrix.write_text(PAIRS)
    done = host.baton(
        "up",
        "--engines=2",
        "--device=cpu",
        f"--host={host.address}",
        "--port=8000",
        "--insecure",
        "--gateways=1",
        f"--gpu-topology={matrix}",
        "--detach",
        timeout=START_DEADLINE,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{host.last_words()}"
    ranks = {member.instance: member for member in host.state.members if member.service == "worker"}
    assert {name: os.sched_getaffinity(rank.pid or 0) for name, rank in ranks.items()} == {
        "engine-1-rank0": {first},
        "engine-2-rank0": set(others),
    }
    assert [rank.device for rank in ranks.values()] == [0, 2]
    said = host.baton("doctor", timeout=START_DEADLINE).stdout
    for line in (
        f"node 0: 1 processors ({first}), 8.0 GiB, GPU 0, GPU 1",
        f"engine-1-rank0: node 0, processors {first}",
        f"engine-2-rank0: node 1, processors {format_cpus(others)}",
        "engine-2: GPU 2",
    ):
        assert line in said
    assert all(Streams(host, QUESTIONS[:2], 8).texts())
    assert host.baton("down", timeout=START_DEADLINE).returncode == 0
