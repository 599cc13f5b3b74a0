"""Which processes of this host hold the weights of a key: a file for each key, with a line for each of them.

Nothing has to be tidied up behind a process that ends, however it does: with it goes its descriptor, by which others
would find the memory, and its lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from services.worker.kv.kept_peaks import forget_oldest
from services.worker.models.weight_sharing.shared_arena import NotShared, progress_of
from shared.config import cache_folder
from shared.private_files import private_opener

STALL_TIMEOUT = 60.0
"""Seconds without progress of a process that loads; whoever waits for it loads the weights itself then."""
MAX_KEYS = 128
"""Files; the oldest go first."""
_POLL = 0.02


class WeightHolders:
    """Those of one key, while this process alone may add to them."""

    def __init__(self, file: int) -> None:
        self._file = file

    @property
    def paths(self) -> list[str]:
        """Where the memory of each can be opened, if it is still there."""
        return _lines(self._file)

    def add(self, memory: int) -> None:
        """This process holds the weights by this descriptor, or will soon; those that are gone are dropped."""
        lines = [*(path for path in self.paths if os.path.exists(path)), f"/proc/{os.getpid()}/fd/{memory}"]
        with suppress(OSError):  # a full disk: others will not find it
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, "".join(f"{line}\n" for line in lines).encode(), 0)


def holders_folder() -> Path:
    """Where the files are. Raises OSError where this user has no home."""
    return cache_folder("weights")


@contextmanager
def holders_of(key: str) -> Iterator[WeightHolders]:
    """Waits while another process adds to the holders of `key`, as long as that one gets on. Raises NotShared."""
    try:
        folder = holders_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = private_opener(folder / key, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise NotShared(f"processes cannot be found: {error}") from None
    try:
        _wait_for_turn(file)
        with suppress(OSError):  # another process does the same
            forget_oldest(folder, MAX_KEYS)
        yield WeightHolders(file)
    finally:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile may have the file, too
        os.close(file)


def _wait_for_turn(file: int) -> None:
    seen, since = -1, time.monotonic()
    while not _locked(file):
        progress = max(map(progress_of, _lines(file)[-1:]), default=0)
        if progress != seen:
            seen, since = progress, time.monotonic()
        elif time.monotonic() - since > STALL_TIMEOUT:
            raise NotShared(f"another process has loaded nothing for {STALL_TIMEOUT:g} s")
        time.sleep(_POLL)


def _locked(file: int) -> bool:
    """Raises NotShared."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a home on a file system of a network may have no locks
        raise NotShared(f"processes cannot wait for each other: {error}") from None
    return True


def _lines(file: int) -> list[str]:
    return os.pread(file, 1 << 16, 0).decode(errors="replace").splitlines()
