"""A liveness clock for actors that share one event loop: while the loop stands still, so does the clock."""

from __future__ import annotations

import time

MAX_STEP = 0.2
"""Seconds that the clock advances between two looks at most. Actors look several times a second, so a longer step means
that the machine had no time for any of them, and that nobody was silent. Less than any silence that tests wait for."""


class StallProofClock:
    """Owns the time; starts at 0. Advances with real time, by `MAX_STEP` at a time at most."""

    def __init__(self) -> None:
        self._now = 0.0
        self._seen = time.monotonic()

    def __call__(self) -> float:
        now = time.monotonic()
        self._now += min(now - self._seen, MAX_STEP)
        self._seen = now
        return self._now
