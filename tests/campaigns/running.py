"""Runs one process until it ends or its time is over, and ends all processes that it started.

A stack runs in sessions of its own, so killing a process group would miss it. What a child leaves behind becomes ours
instead of the system's (on Linux), and so is found.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from shared.config import process_environment
from tests.support.paths import REPOSITORY

PATIENCE = 15.0
"""Seconds to end in after SIGTERM or SIGINT."""
_ADOPT_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER."""


class Ended(NamedTuple):
    status: int | None
    """None: it timed out."""
    seconds: float

    @property
    def said(self) -> str | None:
        """What went wrong."""
        if self.status is None:
            return f"stopped: not over after {self.seconds:.0f} s"
        return None if self.status == 0 else f"ended with status {self.status} after {self.seconds:.0f} s"


def adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)


def run(argv: Sequence[str], seconds: float, log: Path) -> Ended:
    """Arguments of this Python, in the repository; what it says goes to `log`."""
    begun = time.monotonic()
    with log.open("ab") as said:
        process = subprocess.Popen(
            [sys.executable, *argv],
            cwd=REPOSITORY,
            env=process_environment(),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            _interrupt(process)
        finally:
            end_all()
    return Ended(status, time.monotonic() - begun)


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does: it may still write what it has, and end what it started."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)


def end_all() -> None:
    """Sends SIGTERM to all processes that this one has started, then SIGKILL."""
    _signalled("terminate")
    deadline = time.monotonic() + PATIENCE
    while _below() and time.monotonic() < deadline:
        psutil.wait_procs(_below(), timeout=0.2)
    while _below():
        _signalled("kill")
        psutil.wait_procs(_below(), timeout=1.0)
    psutil.wait_procs(psutil.Process().children(), timeout=0.1)  # orphans that have ended are reaped


def _below() -> list[psutil.Process]:
    """All remaining processes except zombies."""
    left = []
    for each in psutil.Process().children(recursive=True):
        try:
            if each.status() != psutil.STATUS_ZOMBIE:
                left.append(each)
        except psutil.NoSuchProcess:
            continue
    return left


def _signalled(how: str) -> None:
    for each in _below():
        try:
            getattr(each, how)()
        except psutil.NoSuchProcess:
            continue
