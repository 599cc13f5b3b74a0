"""Where the processes' output goes, and how it is kept from filling the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import msgspec

from shared.private_files import PRIVATE_FOLDER, private_opener

MAX_LOG_BYTES = 16 * 2**20
"""Bytes. A larger file is copied to `.1`, which replaces the former one, and emptied: what a process has open stays
valid. Lines written between the copy and the emptying are lost."""

MIN_FREE_BYTES = 64 * 1024
LAST_LINES = 12
"""Of a log, to show how its process ended."""


class _Said(msgspec.Struct, frozen=True):
    """A line of a log, as far as it may say why its service ended."""

    event: str
    reason: str = ""


class LogFolder:
    """Owns `<run dir>/logs`: one file per instance, and the former run's in `logs.previous`."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "logs"
        self._previous = run_dir / "logs.previous"

    def begin_run(self) -> None:
        """Makes an empty folder; the one of the run before becomes `logs.previous`. Raises OSError."""
        if self.folder.exists():
            shutil.rmtree(self._previous, ignore_errors=True)
            self.folder.rename(self._previous)
        self.folder.mkdir(parents=True, mode=PRIVATE_FOLDER)

    def of(self, instance: str) -> Path:
        """The log file of an instance, whether it is there or not."""
        return self.folder / f"{instance}.log"

    @contextlib.contextmanager
    def stream(self, instance: str) -> Iterator[TextIO]:
        """The log file of this process itself, to append to; nowhere where it cannot be had."""
        flags = os.O_WRONLY | os.O_APPEND
        try:
            fd = private_opener(self.of(instance), flags | os.O_CREAT)
        except OSError:
            fd = os.open(os.devnull, flags)
        file = os.fdopen(fd, "a")
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):
                file.close()

    def bound(self) -> str | None:
        """Rotates every file that has grown too large; what kept it from being kept, or None. Where there is no room
        for a copy, the lines are lost: the file is emptied all the same."""
        problem = None
        for path in self.folder.glob("*.log"):
            try:
                if path.stat().st_size > MAX_LOG_BYTES:
                    problem = _rotate(path) or problem
            except OSError as error:
                problem = f"{path.name}: {error.strerror}"
        return problem

    def last_lines(self, instance: str) -> list[str]:
        """At most the last LAST_LINES lines of an instance's log; none where there is no log."""
        return last_lines(self.of(instance), LAST_LINES)


def _rotate(path: Path) -> str | None:
    older, problem = path.with_suffix(".log.1"), None
    try:
        with path.open("rb") as full, open(older, "wb", opener=private_opener) as copy:
            shutil.copyfileobj(full, copy)
    except OSError as error:
        problem = f"{path.name} was emptied without a copy: {error.strerror}"
        older.unlink(missing_ok=True)
    os.truncate(path, 0)
    return problem


def full_disk(folder: Path) -> str | None:
    """A sentence where there is no room for logs; None where there is."""
    with contextlib.suppress(OSError):
        if (free := shutil.disk_usage(folder).free) < MIN_FREE_BYTES:
            return f"{folder}: {free / 1024:.0f} KiB left on the disk; log lines are lost"
    return None


def last_lines(path: Path, count: int) -> list[str]:
    """At most the last `count` lines, of at most the last 64 KiB."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65_536))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def failure_reason(path: Path) -> str | None:
    """Why a service ended that said so ("cannot serve"); libraries may have written much behind it. None: it did not
    say."""
    for line in reversed(last_lines(path, 1000)):
        with contextlib.suppress(msgspec.MsgspecError):
            said = msgspec.json.decode(line, type=_Said)
            if said.event == "cannot serve":
                return said.reason
    return None


def log_files(folder: Path) -> Iterator[Path]:
    """All log files of a run, rotated ones first."""
    yield from sorted(folder.glob("*.log.1"))
    yield from sorted(folder.glob("*.log"))
