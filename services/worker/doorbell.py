"""How a thread that computes tells the event loop that something lies ready, without being held up by it.

Whatever waits on the way lets go of Python's lock, and `call_soon_threadsafe` does, where it writes: the event loop
wakes up, takes the lock, and is at work for some tenths of a millisecond while the device has nothing to do. Here the
lock is kept while the byte is written, and let go of by the thread when it computes.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable

_MOST_RINGS = 4096
"""Bytes that are taken at a time: a call answers any number of rings."""

_write = ctypes.PyDLL(None).write  # of the C library; a PyDLL keeps the lock while it calls
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


class Doorbell:
    """Owns a pipe. Made on the event loop, where `answer` is called some time after each `ring`."""

    def __init__(self, answer: Callable[[], None]) -> None:
        self._answer = answer
        self._inside, self._outside = os.pipe()
        os.set_blocking(self._inside, False)
        os.set_blocking(self._outside, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._inside, self._rung)

    def ring(self) -> None:
        """From any thread. A full pipe has rung often enough."""
        _write(self._outside, b"!", 1)

    def _rung(self) -> None:
        os.read(self._inside, _MOST_RINGS)
        self._answer()

    def close(self) -> None:
        """Nobody rings any more."""
        self._loop.remove_reader(self._inside)
        os.close(self._inside)
        os.close(self._outside)
