"""Ports for servers that tests start: nobody else takes one between its choice and the server's `bind`.

A port that the kernel has just found free may be given to whoever asks next, and the tests of several processes ask all
the time. These lie below the range that the kernel gives away, and a process holds a lock on each that it has chosen.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

PORTS = range(20_000, 32_000)
"""Linux gives away 32768 to 60999."""
TRIES = 1000

_held: list[int] = []
"""File descriptors, whose locks end with this process."""


def free_port() -> int:
    """A TCP port of the loopback address that no other process of tests is given while this one lives."""
    folder = Path(tempfile.gettempdir()) / f"baton-test-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    chance = random.SystemRandom()
    for port in (chance.choice(PORTS) for _ in range(TRIES)):
        lock = os.open(folder / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        if _locked(lock) and _is_free(port):
            _held.append(lock)
            return port
        os.close(lock)
    raise RuntimeError(f"none of {TRIES} ports is free")


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
