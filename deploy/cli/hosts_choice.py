"""From what was typed about several hosts to a `HostsSpec`."""

from __future__ import annotations

from deploy.cli.errors import CommandError
from deploy.supervisor.spec import HostsSpec

SHORTEST_TOKEN = 16


def hosts_choice(
    *,
    nodes: int,
    node_rank: int,
    master: str | None,
    token: str | None,
    outside_bus: bool,
    ranks: int,
    pools: int,
    kvstore_memory: str | None,
) -> HostsSpec | None:
    """None: this host only. Raises CommandError."""
    if nodes == 1 and node_rank == 0:
        return None
    if node_rank >= nodes:
        raise CommandError(f"--node-rank {node_rank}: from 0 to {nodes - 1}, as --nodes is {nodes}", status=2)
    if ranks < nodes:
        raise CommandError(f"--nodes {nodes}: an engine has {ranks} ranks only; see --tp and --pp", status=2)
    if pools:
        raise CommandError("--nodes: pools hand over through the KV store of one host; use --engines", status=2)
    if kvstore_memory not in (None, "0"):
        raise CommandError("--nodes: the ranks of an engine over several hosts share no KV store", status=2)
    if not outside_bus and (token is None or len(token) < SHORTEST_TOKEN):
        raise CommandError(
            f"--nodes: BATON_CLUSTER_TOKEN must be the same {SHORTEST_TOKEN} characters or more on every host", status=2
        )
    host, port = _master(master)
    return HostsSpec(master=host, port=port, token=None if outside_bus else token)


def _master(text: str | None) -> tuple[str, int]:
    host, _, port = (text or "").rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise CommandError(f"--master {text}: HOST:PORT of the first host is expected, as all hosts reach it", status=2)
    return host.strip("[]"), int(port)
