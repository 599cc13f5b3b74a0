"""A folder of rows in shared memory: one file for each name, whole or not there. Decides nothing.

Whoever needs rows for longer than their owner makes another name of the same file (a hard link), or maps it: memory is
given back when the last name and the last mapping are gone, so that no process that dies leaves anything that another
one counts on, or nobody can free.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import tempfile
import time
from pathlib import Path

from shared.ids import RowsName
from shared.private_files import PRIVATE_FOLDER, private_opener

_SHARED_MEMORY = Path("/dev/shm")
_LOCK = "lock"
_MAKING = ".making"
_PREFIX = "baton-rows-"
_YOUNG = 60.0
"""Seconds in which a folder may be there and its lock not."""


class FolderTaken(Exception):
    """Another process writes to this folder."""


class NoRoom(Exception):
    """Shared memory takes no more."""


class RowsFolder:
    """Owns one folder, and its lock, which the system takes back when the process ends, however that happens."""

    def __init__(self, path: Path | None) -> None:
        """Makes the folder and locks it. `path` None: one of its own, which nobody else knows, and which goes with it.
        Raises FolderTaken, OSError."""
        self._alone = path is None
        if path is None:
            memory = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
            for other in memory.glob(f"{_PREFIX}*"):
                _clear_left(other)
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=memory))
        self.path = path
        path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise FolderTaken(f"{path}: another process keeps rows here") from None
        self._lock: int | None = lock
        for half in path.glob(f"*{_MAKING}"):
            half.unlink(missing_ok=True)

    def file_of(self, name: RowsName) -> Path:
        """Where rows of this name are, if they are here."""
        return self.path / name.hex()

    def found(self) -> dict[RowsName, int]:
        """What is here, and its bytes: what a former process left."""
        return {RowsName(bytes.fromhex(each.name)): each.stat().st_size for each in _rows_in(self.path)}

    def put(self, name: RowsName, rows: bytes | bytearray) -> None:
        """Keeps rows, in place of those of this name. Raises NoRoom."""
        file = self.file_of(name)
        making = file.with_suffix(_MAKING)
        try:
            with open(making, "wb", opener=private_opener) as new:
                os.posix_fallocate(new.fileno(), 0, len(rows))  # a write without room for it would end the process
                new.write(rows)
            making.replace(file)
        except OSError as error:
            making.unlink(missing_ok=True)
            raise NoRoom(f"{file}: {error.strerror}") from None

    def link(self, name: RowsName, source: Path, size: int) -> bool:
        """Makes the file of another folder one of this folder's, too; whether it is there, and has so many bytes."""
        with contextlib.suppress(FileExistsError):
            try:
                os.link(source, self.file_of(name))
            except OSError:
                return False
        return self.has(name, size)

    def has(self, name: RowsName, size: int) -> bool:
        """Whether rows of this name are here, so many bytes."""
        try:
            return self.file_of(name).stat().st_size == size
        except OSError:
            return False

    def renew(self, name: RowsName) -> None:
        """Marks rows as needed now, for whoever clears the folder once this process is dead."""
        with contextlib.suppress(OSError):
            os.utime(self.file_of(name))

    def remove(self, name: RowsName) -> None:
        """Forgets rows; who has them mapped, or linked, keeps them."""
        self.file_of(name).unlink(missing_ok=True)

    def piece(self, name: RowsName, start: int, size: int) -> bytes:
        """Bytes of rows from `start` on; none where there are none (any more)."""
        try:
            with self.file_of(name).open("rb") as file:
                file.seek(start)
                return file.read(size)
        except OSError:
            return b""

    def close(self) -> None:
        """Gives the lock up; a folder of its own is removed. Safe to call again."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        if self._alone:
            for each in self.path.iterdir():
                each.unlink(missing_ok=True)
            self.path.rmdir()
        os.close(lock)


def map_rows(path: str, size: int) -> mmap.mmap | None:
    """The rows of a file, `size` bytes, without a copy; None where it has not so many, or is not there. They stay as
    long as the mapping does. What is written to it nobody else sees."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                return None
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except OSError:
        return None


def clear_dead(root: Path, lease: float) -> int:
    """Removes rows that nobody has needed for `lease` seconds from folders of processes that are dead, and folders that
    have none; how many rows."""
    removed = 0
    for folder in root.iterdir() if root.is_dir() else ():
        with contextlib.suppress(OSError):
            removed += _clear(folder, time.time() - lease)
    return removed


def _clear_left(folder: Path) -> None:
    """Removes a folder that was its process's own, where that is dead."""
    with contextlib.suppress(OSError):
        if folder.stat().st_mtime < time.time() - _YOUNG:
            _clear(folder, math.inf)


def _clear(folder: Path, before: float) -> int:
    """Raises OSError, BlockingIOError where its process lives."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        old = [each for each in _rows_in(folder) if each.stat().st_mtime < before]
        for each in old:
            each.unlink(missing_ok=True)
        if not _rows_in(folder):
            for each in folder.iterdir():
                each.unlink(missing_ok=True)
            folder.rmdir()
        return len(old)
    finally:
        os.close(lock)


def _rows_in(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if each.name != _LOCK and not each.suffix]
