"""What captured decodes take of a device's memory, found by capturing two of them."""

from __future__ import annotations

from collections.abc import Callable

from services.worker.graphs.capture import Capture, Replay


class MeasuredCapture:
    """Captures as another does, and looks at the free memory before, between and behind."""

    def __init__(self, capture: Capture, free: Callable[[], int]) -> None:
        self._capture = capture
        self._free = free
        self._seen = [free()]

    def capture(self, work: Callable[[], None]) -> Replay:
        replay = self._capture.capture(work)
        self._seen.append(self._free())
        return replay

    def of_all(self, sizes: int) -> int:
        """Bytes that so many sizes take when the largest are those that were captured: the first takes the memory that
        the others share, and each of them little more than what its own launches take."""
        taken = [max(0, before - after) for before, after in zip(self._seen[:-1], self._seen[1:], strict=True)]
        return sum(taken) + (sizes - len(taken)) * (taken[-1] if taken else 0)
