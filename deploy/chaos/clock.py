"""The clock of the machine as a stack's processes see it, which can be put forward and back: libfaketime, preloaded.

What measures durations, the monotonic clock, is left as it is: that clock does not jump on a real machine either.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

NOT_THERE = "libfaketime is not there (pip install libfaketime, or the Debian package faketime)"
LIBRARY = "libfaketime.so.1"
SYSTEM_FOLDERS = ("/usr/lib/x86_64-linux-gnu/faketime", "/usr/lib/aarch64-linux-gnu/faketime", "/usr/lib/faketime")
CACHED_SECONDS = 1
"""After a jump for this long some processes still have the clock of before."""


class FakeClock:
    """Owns the file by which the processes of one stack are told how far their clock is off."""

    def __init__(self, library: Path, file: Path) -> None:
        """`file` may not exist yet. Raises OSError."""
        self._library = library
        self._file = file
        self.shift(0)

    def shift(self, seconds: int) -> None:
        """From CACHED_SECONDS after now every process is this many seconds off, whatever it was before."""
        self._file.write_text(f"{seconds:+d}\n")

    def environment(self) -> Mapping[str, str]:
        """What a process, and those that it starts, need in their environment from their start on."""
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": str(CACHED_SECONDS),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
        }


def faketime_library() -> Path | None:
    """Where libfaketime is, from the Python package of that name or from the system; None where it is not."""
    package = importlib.util.find_spec("libfaketime")
    inside = Path(package.origin).parent.rglob(LIBRARY) if package is not None and package.origin is not None else ()
    return next(filter(Path.is_file, [*inside, *(Path(each, LIBRARY) for each in SYSTEM_FOLDERS)]), None)
