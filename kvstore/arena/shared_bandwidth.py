"""The bandwidth that the store of a node and all ranks there share for KV copies: a file beside the arenas."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from kvstore.core.copy_budget import CopyBudget

FILE = "bandwidth"
FILE_BYTES = 4096
RATE, FULL_AT = 0, 1
"""Words of the file, each a double."""


class SharedBandwidth:
    """Owns the mapping of the file. The store writes the rate, everybody moves the bucket on.

    There is no lock, which a stopped process would hold for all: a word is written whole, and of two that take at the
    same moment one may go uncounted, once in some thousand times.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Maps the file. Raises OSError or ValueError where there is none, or half of one. `clock` must be the same in
        all processes, as the system's monotonic one is."""
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), FILE_BYTES)).cast("d")
        self._clock = clock

    @classmethod
    def publish(cls, directory: Path, rate: int) -> SharedBandwidth:
        """The store's: makes the file if need be, and says how many bytes per second there are; 0: no limit. Raises
        OSError where the directory has no room for it."""
        path = directory / FILE
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(opened, 0, FILE_BYTES)
        finally:
            os.close(opened)
        shared = cls(path)
        shared._words[RATE] = float(rate)
        return shared

    def take(self, size: int) -> float:
        """Seconds to wait before so many bytes are copied; they count from now on."""
        words = self._words
        full_at, wait = CopyBudget(words[RATE]).take(words[FULL_AT], size, self._clock())
        words[FULL_AT] = full_at
        return wait


class BandwidthShare:
    """A rank's share, which is there as soon as a store has made it; without one nothing waits."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._shared: SharedBandwidth | None = None

    def take(self, size: int) -> float:
        """Seconds to wait before so many bytes are copied; see `SharedBandwidth.take`."""
        if self._shared is None:
            try:
                self._shared = SharedBandwidth(self._path)
            except (OSError, ValueError):
                return 0.0
        return self._shared.take(size)
