"""Ends a stack whose supervisor is gone for good: `python -m deploy.supervisor.keeper LOCK SECONDS COMMAND…`.

A shell waits until the lock is free, in a twelfth of the memory of Python, which comes then (ADR 214); without `flock`
it is Python from the start. That waits until nobody has held the lock for so long and then becomes the command, which
is `baton down`: that takes the stack over and ends it in order, the bus included, which does not look after itself as
the services do.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from shared.supervision import looks_until_orphaned

NAME = "keeper"
_WAIT = 'flock -s "$1" true; shift; exec "$@"'
"""Holds the lock for the moment of `true`, which a supervisor that starts just then awaits (`LOCK_TRIES`)."""


def keeper_command(lock: Path, timeout: float, down: list[str]) -> list[str]:
    """The command line of a keeper. `down` is what ends the stack."""
    import shutil  # which the keeper itself does without

    keeper = [sys.executable, "-m", "deploy.supervisor.keeper", str(lock), f"{timeout:g}", *down]
    shell = shutil.which("sh")
    return keeper if shell is None or shutil.which("flock") is None else [shell, "-c", _WAIT, NAME, str(lock), *keeper]


def main(argv: list[str]) -> None:
    """Never returns: ends by a signal, or goes on as the command."""
    for pause in looks_until_orphaned(Path(argv[0]), float(argv[1])):
        time.sleep(pause)
    print(f"no supervisor for {argv[1]} s: the stack drains and ends", file=sys.stderr, flush=True)
    os.execv(argv[2], argv[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
