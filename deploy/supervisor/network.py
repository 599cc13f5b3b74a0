"""Which network the ranks of an engine speak on, where they are on several hosts."""

from __future__ import annotations

import contextlib
import socket

import psutil

from deploy.supervisor.spec import HostsSpec
from shared.config import process_environment

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""By which gloo and NCCL are told. Left alone they take what the host's name stands for, often its loopback."""


def network_environment(hosts: HostsSpec | None) -> dict[str, str]:
    """For the ranks' processes. What the user has set himself stays."""
    if hosts is None or (name := _interface_of(_own_address_towards(hosts.master))) is None:
        return {}
    return {variable: name for variable in VARIABLES if variable not in process_environment()}


def _own_address_towards(host: str) -> str | None:
    """This machine's address on the way to `host`; nothing is sent."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return None


def _interface_of(address: str | None) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None
