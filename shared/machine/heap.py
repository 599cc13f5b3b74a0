"""Memory that was freed, and that the C library keeps for this process."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def give_back_freed_memory() -> bool:
    """Returns free pages of the heap to the system, those of other threads' arenas, too; takes milliseconds.

    glibc does so by itself only at the heap's top, so what a burst took stays resident beneath anything that lives on.
    False where there was nothing to return, or another C library is at work."""
    trim = _trim()
    return trim is not None and bool(trim(0))


@cache
def _trim() -> Any:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library, or none to be found
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim
