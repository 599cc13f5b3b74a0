"""Stacks on Ray clusters of several raylets: a lane of its own, `make test-ray`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster.ray_nodes import RayNode, RayNodes

NODES = 3
NODE_CPUS = 5
"""Of each node: what the test runs fits on two of them, so that none is to be added while streams run."""


class RayMachines:
    """A cluster and those of its nodes that no test has killed."""

    def __init__(self, cluster: RayNodes) -> None:
        self.cluster = cluster
        self.nodes: list[RayNode] = [cluster.add_node() for _ in range(NODES)]

    @property
    def address(self) -> str:
        return self.cluster.address

    def lose(self, node: RayNode) -> None:
        """Kills a node."""
        self.nodes.remove(node)
        node.kill()

    def node_of(self, pid: int) -> RayNode:
        """The node that a process of the stack runs on: its actor is a child of the raylet."""
        import psutil

        above = {parent.pid for parent in psutil.Process(pid).parents()}
        return next(node for node in self.nodes if node.raylet in above)


@pytest.fixture(scope="module")
def machines() -> Iterator[RayMachines]:
    """A head without resources and NODES nodes."""
    with RayNodes(NODE_CPUS) as cluster:
        yield RayMachines(cluster)
