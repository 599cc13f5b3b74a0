"""From what was typed about several hosts, or a bus on another one, to a `HostsSpec` or a `ClusterSpec`."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from deploy.errors import CommandError
from deploy.supervisor.settings import StackSettings
from deploy.supervisor.spec import ClusterSpec, HostsSpec, TlsFiles
from shared.addresses import is_loopback, is_private
from shared.config import process_environment
from shared.ids import NodeId
from shared.machine.home import expanded

MIN_TOKEN_LENGTH = 16


def hosts_choice(
    stack: StackSettings, *, outside_bus: bool, ranks: int, kvstore_memory: str | None
) -> HostsSpec | None:
    """None: this host only. `ranks` are those of an engine. Raises CommandError."""
    if stack.nodes == 1 and stack.node_rank == 0:
        return None
    if stack.node_rank >= stack.nodes:
        raise CommandError(
            f"--node-rank {stack.node_rank}: from 0 to {stack.nodes - 1}, as --nodes is {stack.nodes}", status=2
        )
    if ranks < stack.nodes:
        raise CommandError(f"--nodes {stack.nodes}: an engine has {ranks} ranks only; see --tp and --pp", status=2)
    if stack.prefill + stack.decode:
        raise CommandError("--nodes: pools hand over through the KV store of one host; use --engines", status=2)
    if kvstore_memory not in (None, "0"):
        raise CommandError("--nodes: the ranks of an engine over several hosts share no KV store", status=2)
    token = stack.cluster_token
    if not outside_bus and (token is None or len(token) < MIN_TOKEN_LENGTH):
        raise CommandError(
            f"--nodes: BATON_CLUSTER_TOKEN must be the same {MIN_TOKEN_LENGTH} characters or more on every host",
            status=2,
        )
    host, port = _master(stack.master)
    tls = _tls_files(stack)
    if not (stack.insecure or is_loopback(host)):
        _check_network(host, stack.node_rank, tls, outside_bus=outside_bus)
    if outside_bus:
        return HostsSpec(master=host, port=port)
    return HostsSpec(master=host, port=port, token=token, tls=tls)


def _master(text: str | None) -> tuple[str, int]:
    host, _, port = (text or "").rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise CommandError(f"--master {text}: HOST:PORT of the first host is expected, as all hosts reach it", status=2)
    return host.strip("[]"), int(port)


def _check_network(host: str, node_rank: int, tls: TlsFiles | None, *, outside_bus: bool) -> None:
    serves = node_rank == 0
    if not outside_bus and (tls is None or (serves and tls.certificate is None)):
        raise CommandError(
            f"--master {host}: the bus would go over the network unencrypted; give --tls-ca on every host, and "
            "--tls-cert and --tls-key on host 0, or --insecure",
            status=2,
        )
    if not is_private(host):
        raise CommandError(
            f"--master {host}: what ranks send each other is neither encrypted nor authenticated, and this is no "
            "address of a private network; choose one that is, or --insecure",
            status=2,
        )


def _tls_files(stack: StackSettings) -> TlsFiles | None:
    """None where none are given. Raises CommandError where some are missing."""
    given = {"--tls-ca": stack.tls_ca, "--tls-cert": stack.tls_cert, "--tls-key": stack.tls_key}
    found = {flag: expanded(path).absolute() for flag, path in given.items() if path is not None}
    for flag, path in found.items():
        if not path.is_file():
            raise CommandError(f"{flag} {path}: there is no such file", status=2)
    if not found:
        return None
    if "--tls-ca" not in found or ("--tls-cert" in found) != ("--tls-key" in found):
        raise CommandError("--tls-ca is for every host, --tls-cert and --tls-key together for host 0", status=2)
    authority, certificate, key = (str(found[flag]) if flag in found else None for flag in given)
    assert authority is not None, "checked above"
    return TlsFiles(authority=authority, certificate=certificate, key=key)


def check_outside_bus(urls: Sequence[str], *, insecure: bool) -> None:
    """Raises CommandError where the way to an external NATS server leaves this machine unencrypted."""
    has_authority = any(f"BATON_NATS_CA{suffix}" in process_environment() for suffix in ("", "_FILE"))
    if insecure or has_authority:
        return
    for url in urls:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        if parts.scheme not in ("tls", "wss") and not is_loopback(parts.hostname or ""):
            raise CommandError(
                f"--nats-url {parts.hostname}: prompts and passwords would go over the network unencrypted; use "
                "tls://, set BATON_NATS_CA, or --insecure",
                status=2,
            )


# Hosts that join, each with engines of its own.


JOIN_PORT = 6221


def cluster_choice(stack: StackSettings, node: NodeId, *, is_running: bool) -> ClusterSpec | None:
    """None: no other host can join. `is_running`: processes of this stack go on without their supervisor, and have the
    ports. Raises CommandError."""
    if stack.advertise_address is None:
        return None
    if stack.nodes > 1:
        raise CommandError("--advertise-address lets hosts join, --nodes spreads engines over them: choose", status=2)
    check_certificates()
    address, port = host_address("--advertise-address", stack.advertise_address, JOIN_PORT)
    if port == stack.route_port:
        raise CommandError(f"--route-port {port}: hosts join at this port of the same address; another one", status=2)
    if stack.model_port in (port, stack.route_port):
        raise CommandError(f"--model-port {stack.model_port}: another port of this address is needed, or 0", status=2)
    for each in (port, stack.route_port, *([stack.model_port] if stack.model_port else [])) if not is_running else ():
        _check_listens(address, each)
    return ClusterSpec(
        node=node, address=address, route_port=stack.route_port, model_port=stack.model_port, join_port=port
    )


def check_certificates() -> None:
    """Raises CommandError where the library is missing that makes hosts' certificates."""
    if importlib.util.find_spec("cryptography") is None:
        raise CommandError("hosts know each other by certificates: pip install cryptography")


def host_address(option: str, text: str, default_port: int) -> tuple[str, int]:
    """ADDRESS or ADDRESS:PORT, IPv6 addresses in brackets. Raises CommandError."""
    parts = urlsplit(f"//{text}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.path or parts.username is not None or port == 0:
        raise CommandError(f"{option} {text}: ADDRESS or ADDRESS:PORT is expected, as other hosts reach it", status=2)
    if host in ANY_ADDRESS:
        raise CommandError(f"{option} {text}: one address is expected that other hosts reach, not all", status=2)
    return host, port or default_port


def _check_listens(address: str, port: int) -> None:
    try:
        socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError as error:
        raise CommandError(
            f"--advertise-address {address}: this host cannot listen at port {port} there ({error.strerror}); see "
            "--route-port, --model-port, and ADDRESS:PORT"
        ) from None


ANY_ADDRESS = ("0.0.0.0", "::")
