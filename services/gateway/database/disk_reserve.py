"""Room on the database's disk that is kept for deletions: SQLite writes before it frees, so that a full disk would stay
full."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from shared.private_files import private_opener

RESERVE_BYTES = 8 * 2**20
"""More than SQLite writes until its log is part of the file, 4 MiB, and a deletion's own pages."""
OUT_OF_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
"""What SQLite answers on a full disk, by what it was about to write: contents, or the files beside its own."""


class DiskReserve:
    """A file beside SQLite's, of which there is one for all gateways. All calls may block."""

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(f"{database.name}-reserve")

    @property
    def is_kept(self) -> bool:
        """Whether it is there, as a whole."""
        try:
            return self._path.stat().st_size >= RESERVE_BYTES
        except OSError:
            return False

    def keep(self) -> bool:
        """Makes it where it is not there; whether it is. Where it cannot be, the disk is full, and what is left of it
        is for deletions. Several may do so at once: of one file, so that nobody takes another one's away."""
        if self.is_kept:
            return True
        try:
            with open(self._path, "ab", opener=private_opener) as file:
                os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
        except OSError:
            self.give_up()
            return False
        return True

    def give_up(self) -> None:
        """Gives its room to whoever writes next, where that can be."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def is_out_of_room(error: BaseException | None) -> bool:
    """Whether SQLite says so. Its codes have what went wrong in their lowest byte."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in OUT_OF_ROOM
