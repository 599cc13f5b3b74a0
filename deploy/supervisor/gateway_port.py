"""Holds the HTTP port for the gateways from before they start until they have ended.

They share it (SO_REUSEPORT), so a second stack could slip in unnoticed; here it fails at once. The socket is bound and
never listens: it takes no connections.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


class PortTaken(Exception):
    """Somebody else listens there, or the address is not ours; the text says so."""


@contextlib.contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """The port, a free one for 0, kept for sockets with SO_REUSEPORT. Raises PortTaken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
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
            f"port {port} on {host} cannot be had ({error.strerror}); choose with --host and --port"
        ) from None
