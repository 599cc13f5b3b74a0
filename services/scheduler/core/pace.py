"""How long steps take, so that a plan ahead is made as late as it safely can be.

A plan that is sent early shuts out whoever arrives while the step before it runs. Sent in time, but not before,
it still finds the device busy, and holds the newcomers of half a step more.
"""

from __future__ import annotations

from collections import deque

RECENT = 8
"""Steps of a size that are remembered."""
LEAD = 0.004
"""Seconds that a plan needs at the most to reach the workers and be prepared."""


class Pace:
    """Owns how long the last steps took, by their size in tokens rounded to a power of two."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def took(self, tokens: int, seconds: float) -> None:
        self._seconds.setdefault(tokens.bit_length(), deque(maxlen=RECENT)).append(seconds)

    def patience(self, tokens: int) -> float:
        """Seconds after the start of a step of `tokens` until which the plan behind it may wait.

        Half of the shortest that such a step took lately, and never so long that less than LEAD is left. 0 for a
        size that was not seen yet.
        """
        shortest = min(self._seconds.get(tokens.bit_length(), (0.0,)))
        return max(0.0, min(shortest / 2, shortest - LEAD))
