"""Which addresses other machines reach."""

from __future__ import annotations

import contextlib
import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach `host`; not so for a name, as it may come to mean anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def loopback_interface() -> str | None:
    """The name of the network interface that no other machine reaches; None where it has none of the usual names."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def is_private(host: str) -> bool:
    """Whether every address that `host` has now is one of a private network, which the internet does not reach."""
    with contextlib.suppress(OSError, ValueError):
        found = {ipaddress.ip_address(str(info[4][0]).split("%")[0]) for info in socket.getaddrinfo(host, None)}
        return bool(found) and all(address.is_private and not address.is_unspecified for address in found)
    return False
