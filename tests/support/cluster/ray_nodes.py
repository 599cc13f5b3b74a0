"""A Ray cluster of several raylets on this machine, each with an address of its own on loopback.

`python -m tests.support.cluster.ray_nodes CPUS FOLDER` starts a head without resources; then a line on stdin adds a
node, and it says what it has added. It ends, with the cluster, at the end of stdin.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from tests.support.cluster.stack import die_with_parent
from tests.support.paths import REPOSITORY

OBJECT_STORE = 80 * 2**20
"""Bytes; the least that Ray accepts. The stack keeps nothing there."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "PYTHONPATH": str(REPOSITORY),
    "OMP_NUM_THREADS": "1",
}
NOTICES_DEATHS = {
    "health_check_initial_delay_ms": 2_000,
    "health_check_period_ms": 1_000,
    "health_check_timeout_ms": 2_000,
    "health_check_failure_threshold": 3,
}
STOP_DEADLINE = 60.0


class RayNode(NamedTuple):
    """A raylet."""

    address: str
    raylet: int
    """Its pid."""

    def kill(self) -> None:
        """SIGKILL: what it had started, Ray's workers, ends by itself."""
        os.kill(self.raylet, signal.SIGKILL)


class RayNodes:
    """Owns the process that owns the cluster; a context manager, after which nothing is left of it."""

    def __init__(self, cpus: float) -> None:
        """`cpus`: of each node."""
        self.temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.cluster.ray_nodes", str(cpus), self.temporary],
            cwd=REPOSITORY,
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        said = self._said()
        self.address = str(said["address"])
        self._head: list[int] = said["head"]
        """The pids of its raylet, and of what the whole cluster asks."""

    def add_node(self) -> RayNode:
        """Returns once it is part of the cluster."""
        assert self._process.stdin is not None
        self._process.stdin.write("add\n")
        self._process.stdin.flush()
        return RayNode(**self._said())

    def lose_head(self) -> None:
        """SIGKILL to what only the head runs."""
        for pid in self._head:
            os.kill(pid, signal.SIGKILL)

    def _said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError(f"the Ray cluster ended with {self._process.wait()}")

    def __enter__(self) -> RayNodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_DEADLINE)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            shutil.rmtree(self.temporary, ignore_errors=True)


def main() -> None:
    from ray.cluster_utils import Cluster

    cpus, temporary = float(sys.argv[1]), sys.argv[2]
    Path("/tmp/ray").mkdir(exist_ok=True)  # a `Cluster` notes its address there, wherever else its files are
    shared = {"object_store_memory": OBJECT_STORE, "include_dashboard": False, "memory": 2**30}
    head = {**shared, "num_cpus": 0, "node_ip_address": "127.0.0.2", "_system_config": NOTICES_DEATHS}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "temp_dir": temporary})
    own = cluster.head_node.all_processes
    pids = [own[kind][0].process.pid for kind in ("gcs_server", "raylet")]
    print(json.dumps({"address": cluster.address, "head": pids}), flush=True)
    number = 3
    for _ in sys.stdin:
        address, number = f"127.0.0.{number}", number + 1
        node = cluster.add_node(num_cpus=cpus, node_ip_address=address, **shared)
        raylet = node.all_processes["raylet"][0].process.pid
        print(json.dumps({"address": address, "raylet": raylet}), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
