"""Namespaces of chaos's own, in which links and mounts can be changed and nothing else on the machine notices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

PROBE_SECONDS = 10.0
WAYS = (("unshare", "--net", "--mount"), ("unshare", "--user", "--map-root-user", "--net", "--mount"))
"""For root, and for users where the kernel lets them."""
NOT_PERMITTED = "network and mount namespaces are not permitted here (unshare --net --mount)"


def namespaces_command() -> Sequence[str] | None:
    """What has to stand before a command so that it runs in namespaces of its own; None where nothing may."""
    for way in WAYS:
        if _succeeds([*way, "true"]):
            return way
    return None


def run_again(way: Sequence[str], argv: Sequence[str]) -> NoReturn:
    """Becomes the `baton` command `argv` in namespaces of its own, as the same process."""
    os.execvp(way[0], [*way, sys.executable, "-m", "deploy.cli", *argv])


def set_link(up: bool) -> None:
    """The loopback of these namespaces; new ones have it down. Raises OSError, subprocess.SubprocessError."""
    _run(["ip", "link", "set", "lo", "up" if up else "down"])


def limit_rate(rate: str | None) -> None:
    """Bounds what the loopback of these namespaces carries (`tc tbf`), such as `8mbit`; None: it is unbounded again.
    Raises OSError, subprocess.SubprocessError."""
    if rate is None:
        _run(["tc", "qdisc", "del", "dev", "lo", "root"])
    else:
        _run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "1s"])


def can_limit_rate() -> bool:
    """Whether the kernel and this machine's `tc` know how."""
    try:
        limit_rate("1gbit")
        limit_rate(None)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def mount_small_disk(where: os.PathLike[str], size: str) -> None:
    """A file system in memory, which only these namespaces see. Raises OSError, subprocess.SubprocessError."""
    _run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", os.fspath(where)])


def unmount(where: os.PathLike[str]) -> None:
    """Also where it is still in use: it is gone once it is not. Raises OSError, subprocess.SubprocessError."""
    _run(["umount", "-l", os.fspath(where)])


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=PROBE_SECONDS)


def _succeeds(command: Sequence[str]) -> bool:
    try:
        _run(command)
    except (OSError, subprocess.SubprocessError):
        return False
    return True
