"""The connection to a Ray cluster, and what is found there."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import ray

from deploy.errors import CommandError
from deploy.supervisor.spec import RaySpec, StackSpec
from shared.addresses import is_loopback

CONNECT_TIMEOUT = 5.0
NAMESPACE = "baton"
"""Of Ray: where the names of actors and placement groups hold."""


class RayCluster:
    """What the cluster had when this process connected."""

    def __init__(self) -> None:
        self.own_address = str(ray.util.get_node_ip_address())
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self.addresses = frozenset(str(node["NodeManagerAddress"]) for node in nodes)
        self.has_gpus = any(node["Resources"].get("GPU", 0) >= 1 for node in nodes)

    def gpus_per_rank(self, settings: RaySpec) -> int:
        """GPUs that each rank asks for."""
        return int(self.has_gpus) if settings.gpus_per_rank == "auto" else settings.gpus_per_rank

    def check(self, spec: StackSpec) -> None:
        """Raises CommandError where nodes could not reach what the stack runs here."""
        others = sorted(each for each in self.addresses if each != self.own_address and not is_loopback(each))
        if others and spec.outside_bus is None:
            raise CommandError(
                f"--nats-url: nodes of the Ray cluster ({', '.join(others[:3])}) do not reach the bus that baton up "
                "starts on this machine; give a NATS server that all of them reach",
                status=2,
            )


@contextlib.contextmanager
def ray_cluster(spec: StackSpec, settings: RaySpec) -> Iterator[RayCluster]:
    """Connects to the cluster, of which this machine is a node. Raises CommandError."""
    if settings.address is not None:
        _check_reachable(settings.address)
    try:
        # Or else its head's words are printed over ours.
        where, level = settings.address or "auto", logging.ERROR
        ray.init(address=where, namespace=NAMESPACE, log_to_driver=False, logging_level=level)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = settings.address or "on this machine (ray start --head)"
        raise CommandError(f"--launcher ray: no cluster {where}: {str(error).strip().splitlines()[0]}") from None
    try:
        logging.setLogRecordFactory(logging.LogRecord)  # Ray's adds fields to every line of ours
        cluster = RayCluster()
        cluster.check(spec)
        yield cluster
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Before Ray tries for minutes. Raises CommandError."""
    expected = "HOST:PORT of the cluster's head is expected, as `ray start` prints it"
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or port is None or "//" in address:
        raise CommandError(f"--ray-address {address}: {expected}", status=2)
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT).close()
    except OSError as error:
        raise CommandError(f"--ray-address {address}: {error.strerror or error}") from None
