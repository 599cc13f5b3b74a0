"""Runs a program that knows nothing of us and ends it when a pipe does: `python -m deploy.supervisor.servers.tether FD
ARGV…`.

For systems whose kernel does not kill a child when its parent dies.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

POLL_INTERVAL = 0.2


def tethered(fd: int, argv: list[str]) -> int:
    """Runs `argv` until it ends or `fd` reaches end of file; its exit status."""
    child = subprocess.Popen(argv)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        while child.poll() is None:
            readable, _, _ = select.select([fd], [], [], POLL_INTERVAL)
            if readable and not os.read(fd, 1):
                return 1
        return child.returncode
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        child.wait()


if __name__ == "__main__":
    raise SystemExit(tethered(int(sys.argv[1]), sys.argv[2:]))
