"""Gives pages of mapped files back to the system: code that ran once, as libraries do when they are loaded."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+)")
_ANONYMOUS = re.compile(r"Anonymous: +(\d+) kB")
_MADV_DONTNEED = 4


def release_file_pages() -> None:
    """Lets go of all pages of this process that are still as their files have them; one that is used again comes from
    the file, as a rule from the system's cache of it. Does nothing where the system has no /proc."""
    with suppress(OSError):
        madvise = ctypes.CDLL(None).madvise
        with Path("/proc/self/smaps").open() as lines:
            for start, end in untouched_mappings(lines):
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def untouched_mappings(lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    """First address and the one behind the last of each mapping of a file in `smaps` (proc_pid_smaps(5)) that cannot
    be written to and has no page of the process's own. Relocated tables cannot be written to, either, but are its own:
    what the loader wrote there would be lost."""
    found: tuple[int, int] | None = None
    for line in lines:
        if mapping := _MAPPING.match(line):
            start, end, rights, inode = mapping.groups()
            is_file = inode != "0" and "w" not in rights and rights.endswith("p")
            found = (int(start, 16), int(end, 16)) if is_file else None
        elif found is not None and (own := _ANONYMOUS.match(line)):
            if own[1] == "0":
                yield found
            found = None
