"""The directory of arena files: one store at a time, whole files only."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from kvstore.arena.mapped_arena import ArenaError
from kvstore.arena.owned_arena import OwnedArena
from kvstore.core.layout import SUFFIX, file_name
from shared.ids import ArenaId
from shared.messages.kvstore import KvLayout

log = logging.getLogger(__name__)

LOCK = "lock"


class DirectoryTaken(Exception):
    """Another store works in this directory."""


class DirectoryUnusable(Exception):
    """The directory cannot be made or written to; the text says why."""


class StoreDirectory:
    """Owns the directory's lock, which the system takes back when the process ends, however that happens."""

    def __init__(self, path: Path) -> None:
        """Makes the directory and locks it. Raises DirectoryTaken, DirectoryUnusable."""
        self.path = path
        self._lock: int | None = None
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DirectoryUnusable(f"{path}: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise DirectoryTaken(f"{path}: another store works here") from None
        self._lock = lock

    def found(self) -> Iterator[OwnedArena]:
        """The arenas that a former store left; files that are no arena, or half of one, are removed."""
        for path in sorted(self.path.glob("*.making")):
            path.unlink(missing_ok=True)
        for path in sorted(self.path.glob(f"*{SUFFIX}")):
            try:
                arena = OwnedArena.open(path)
            except ArenaError as error:
                log.warning("arena removed", extra={"error": str(error)})
                path.unlink(missing_ok=True)
                continue
            yield arena

    def create(self, layout: KvLayout, slots: int) -> OwnedArena:
        """A new arena in place of any other of this layout. Raises ArenaUnreadable, UnknownDtype, OSError."""
        path = self.path / file_name(layout)
        return OwnedArena.create(path, ArenaId(secrets.randbits(63)), layout, slots)

    def remove(self, arena: OwnedArena) -> None:
        """Unlinks the file; processes that have it mapped keep their view."""
        arena.path.unlink(missing_ok=True)
        arena.close()

    def close(self) -> None:
        """Gives the lock up. Safe to call again."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)
