"""Holds the HTTP port for the gateways from before they start until they have ended.

They share it (SO_REUSEPORT), so a second stack could slip in unnoticed; here it fails at once. The socket is bound and
never listens: it takes no connections.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import psutil

from deploy.supervisor.spec import HostsSpec
from shared.addresses import loopback_interface, rank_interfaces
from shared.config import process_environment


class PortTaken(Exception):
    """The port is in use, or the address is not ours; the text says so."""


@contextlib.contextmanager
def reserved_port(host: str, port: int, *, ours: bool = False) -> Iterator[int]:
    """The port, a free one for 0, kept for sockets with SO_REUSEPORT. `ours`: gateways of this stack listen there
    already. Raises PortTaken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not ours:
        _check_free(family, host, port)
    with socket.socket(family) as keeper:
        if hasattr(socket, "SO_REUSEPORT"):
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _bind(keeper, host, port)
        yield int(keeper.getsockname()[1])


def _check_free(family: socket.AddressFamily, host: str, port: int) -> None:
    if port:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a former run may linger
            _bind(probe, host, port)


def _bind(one: socket.socket, host: str, port: int) -> None:
    try:
        one.bind((host, port))
    except OSError as error:
        raise PortTaken(
            f"port {port} on {host} cannot be had ({error.strerror}); choose with --host and --port (0: any free one)"
        ) from None


# Which network the ranks of an engine speak on.


def network_environment(hosts: HostsSpec | None) -> dict[str, str]:
    """For the ranks' processes: those of one host speak where no other machine reaches them. What the user has set
    himself stays."""
    name = loopback_interface() if hosts is None else interface_of(own_address_towards(hosts.master))
    return rank_interfaces(name, process_environment())


def own_address_towards(host: str) -> str | None:
    """This machine's address on the way to `host`; nothing is sent."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return None


def interface_of(address: str | None) -> str | None:
    """The name of this machine's network interface that has an address; None where none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None
