"""Which addresses other machines reach, and where the ranks of one engine find each other."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path

RANK_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The variables that gloo and NCCL read. Without them they use the address of the host's name, whatever that is."""


def host_and_port(host: str, port: int) -> str:
    """ "host:port", with IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach `host`; not so for a name, as it may come to mean anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def loopback_interface() -> str | None:
    """The name of the network interface that no other machine reaches; None where it has none of the usual names."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def rank_interfaces(interface: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that make ranks speak on `interface`; none where that is None. What the user has set in `environment`
    himself stays."""
    return {} if interface is None else {name: interface for name in RANK_INTERFACES if name not in environment}


def rendezvous_file(folder: Path, prefix: str) -> str:
    """The address of a file that does not exist yet, where ranks of one host meet: they create it, and the last one
    removes it."""
    return f"file://{folder / f'{prefix}-{uuid.uuid4().hex}'}"


def is_private(host: str) -> bool:
    """Whether every address that `host` has now is one of a private network, which the internet does not reach."""
    with contextlib.suppress(OSError, ValueError):
        found = {ipaddress.ip_address(str(info[4][0]).split("%")[0]) for info in socket.getaddrinfo(host, None)}
        return bool(found) and all(address.is_private and not address.is_unspecified for address in found)
    return False
