"""What captured decodes take of a device's memory, found by capturing two of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from services.worker.graphs.capture import Capture, Replay

DRIVER_MOST = 32 << 20
"""Bytes that the driver may keep for one graph. What else is missing then was taken by other processes meanwhile."""


class Seen(NamedTuple):
    """Of a device's memory, in bytes."""

    free: int
    own: int
    """What this process is known to hold."""


class MeasuredCapture:
    """Captures as another does, and looks at the memory before, between and behind."""

    def __init__(self, capture: Capture, look: Callable[[], Seen]) -> None:
        self._capture = capture
        self._look = look
        self._seen = [look()]

    def capture(self, work: Callable[[], None]) -> Replay:
        replay = self._capture.capture(work)
        self._seen.append(self._look())
        return replay

    def of_all(self, sizes: int) -> int:
        """Bytes that so many sizes take when the largest are those that were captured: the first takes the memory that
        the others share, and each of them little more than what its own launches take."""
        taken = [_taken(before, after) for before, after in zip(self._seen[:-1], self._seen[1:], strict=True)]
        return sum(taken) + (sizes - len(taken)) * (taken[-1] if taken else 0)


def _taken(before: Seen, after: Seen) -> int:
    """By one graph. Others may take and give back what they like meanwhile."""
    own = max(0, after.own - before.own)
    return min(max(own, before.free - after.free), own + DRIVER_MOST)
