"""Python keeps frames in chunks of 16 KiB, and gives a chunk back once its first frame ends: where what is called often
happens to begin a chunk, each call maps memory, clears a page and unmaps it. That was most of the system's time in some
tests, by how deep pytest-xdist had called them; a service's event loop is as deep as its start called it (ADR 241)."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

_WORDS = 2**16
"""Of the frame that a chunk is made for. The chunk has 2**17, the next power of two: the rest is for what is called."""


def call_with_room(call: Callable[[], None]) -> None:
    """Calls it where the frames of all that it calls, a thousand of the usual size, lie in one chunk."""
    roomy = _call.__code__.replace(co_stacksize=_WORDS)
    FunctionType(roomy, {})(call)


def _call(call: Callable[[], None]) -> None:
    call()
