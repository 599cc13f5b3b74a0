"""How long steps take, so that a plan ahead is made as late as it safely can be.

A plan that is sent early shuts out whoever arrives while the steps before it run. Sent in time, but not before,
it still finds the device busy, and holds the newcomers of half a step more. So plans run as far ahead as short steps
need, and long ones do not pay for that.
"""

from __future__ import annotations

from collections import deque

RECENT = 8
"""Steps of a size that are remembered."""
LEAD = 0.006
"""Seconds that a plan needs at the most to reach the workers and be prepared: 1 to 2 ms on a quiet machine, and the
rest for pauses of all who have a part in it."""
SOON = 0.001
"""Seconds that are not worth waiting for: timers are no finer."""


class Pace:
    """Owns how long the last steps took, by their size in tokens rounded to a power of two."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def took(self, tokens: int, seconds: float) -> None:
        self._seconds.setdefault(tokens.bit_length(), deque(maxlen=RECENT)).append(seconds)

    def patience(self, *sizes: int) -> float:
        """Seconds after the start of the first of some steps, of so many tokens each, until which the plan behind the
        last may wait.

        Until the last is half over, each taken for the shortest of its size lately; and never so long that less than
        LEAD is left. 0 where a size was not seen yet.
        """
        shortest = [min(self._seconds.get(tokens.bit_length(), (0.0,))) for tokens in sizes]
        if not all(shortest):
            return 0.0
        patience = sum(shortest) - max(shortest[-1] / 2, LEAD)
        return patience if patience > SOON else 0.0
