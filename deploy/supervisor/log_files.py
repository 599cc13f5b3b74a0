"""Where the processes' output goes, and how it is kept from filling the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

MAX_LOG_BYTES = 16 * 2**20
"""Bytes. A larger file is copied to `.1`, which replaces the former one, and emptied: what a process has open stays
valid. Lines written between the copy and the emptying are lost."""


class LogFolder:
    """Owns `<run dir>/logs`: one file per instance, and the former run's in `logs.previous`."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "logs"
        self._previous = run_dir / "logs.previous"

    def begin_run(self) -> None:
        """Makes an empty folder; the one of the run before becomes `logs.previous`."""
        if self.folder.exists():
            shutil.rmtree(self._previous, ignore_errors=True)
            self.folder.rename(self._previous)
        self.folder.mkdir(parents=True)

    def of(self, instance: str) -> Path:
        """The log file of an instance, whether it is there or not."""
        return self.folder / f"{instance}.log"

    def bound(self) -> None:
        """Rotates every file that has grown too large."""
        for path in self.folder.glob("*.log"):
            if path.stat().st_size > MAX_LOG_BYTES:
                shutil.copyfile(path, path.with_suffix(".log.1"))
                os.truncate(path, 0)

    def last_lines(self, instance: str, count: int = 12) -> list[str]:
        """At most the last `count` lines of an instance's log; none where there is no log."""
        return last_lines(self.of(instance), count)


def last_lines(path: Path, count: int) -> list[str]:
    """At most the last `count` lines, of at most the last 64 KiB."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65_536))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        return []


def log_files(folder: Path) -> Iterator[Path]:
    """All log files of a run, rotated ones first."""
    yield from sorted(folder.glob("*.log.1"))
    yield from sorted(folder.glob("*.log"))
