"""Memory that was freed, and that the C library keeps for this process."""

from __future__ import annotations

import ctypes
import sys
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


def keep_forks_apart() -> None:
    """Gives free pages back and takes for good what is free between allocations, so that a process that is forked from
    now on allocates behind all of them, in pages of its own. In the holes, each of its small allocations would have the
    system copy a page that it shares: a tokenizer's 1 MiB of them took 5. Takes milliseconds; does nothing with another
    C library.

    What Python remembers of attributes that it has looked up is forgotten first: it holds their names, and look-ups of
    a forked process would let go of each, on a page that it shares until then."""
    if sys.version_info < (3, 12):  # from then on names have no references to count
        sys._clear_type_cache()
    if (heap := _heap()) is None:
        return
    give_back_freed_memory()
    first_own = heap.sbrk(0) - heap.mallinfo2().keepcost  # where what is free behind all allocations begins
    for size in _SIZES:
        while (taken := heap.malloc(size)) and taken < first_own:
            pass
        heap.free(taken)


_SIZES = (*(int(98_304 * 0.875**step) for step in range(34)), *range(1032, 0, -16))
"""Bytes, descending. From 128 KiB on, glibc asks the system for pages of their own; of up to 1,032 it keeps a few freed
blocks for each size, of which it takes nothing smaller."""


class _Usage(ctypes.Structure):
    """`struct mallinfo2` (mallinfo(3))."""

    _fields_ = [("of_no_interest", ctypes.c_size_t * 9), ("keepcost", ctypes.c_size_t)]


@cache
def _heap() -> Any:
    try:
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Usage
        library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
        library.sbrk.argtypes, library.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
    except (OSError, AttributeError, TypeError):  # another C library, or none to be found
        return None
    return library
