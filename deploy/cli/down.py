"""`baton down`: asks the supervisor to end, and waits until it has."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from deploy.cli.errors import CommandError
from deploy.supervisor.arenas import clear_leftovers
from deploy.supervisor.state_file import StackState, is_held

LOOK_EVERY = 0.05
PATIENCE = 120.0
"""Seconds; the supervisor has tighter deadlines of its own."""


def stop_stack(state: StackState, run_dir: Path, *, now: bool) -> None:
    """Returns when the supervisor, and with it everything, is gone. Raises CommandError."""
    for _ in range(2 if now else 1):
        _ask(state.pid)
        time.sleep(LOOK_EVERY)
    deadline = time.monotonic() + PATIENCE
    while is_held(run_dir):
        if time.monotonic() > deadline:
            raise CommandError(f"stack {state.name} has not ended within {PATIENCE:g} s; try: baton down --now")
        time.sleep(LOOK_EVERY)
    print(f"Stack {state.name} stopped.")


def remove_what_was_left(run_dir: Path) -> bool:
    """After a supervisor that was killed: what it had in shared memory. False where it left nothing, or lives."""
    if not clear_leftovers(run_dir):
        return False
    print("No stack runs; what a killed one had left in shared memory is removed.")
    return True


def _ask(pid: int) -> None:
    try:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    except PermissionError:
        raise CommandError(f"process {pid} belongs to somebody else") from None
