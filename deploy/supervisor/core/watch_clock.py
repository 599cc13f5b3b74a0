"""A clock for the watchdog that a pause of the supervisor itself does not move: whoever slept has no right to blame."""

from __future__ import annotations

LONGEST_STEP = 1.0
"""Seconds that count between two looks. The supervisor looks five times a second; what is beyond was its own pause."""


class WatchClock:
    """Owns how much time has counted so far."""

    def __init__(self) -> None:
        self._counted = 0.0
        self._last: float | None = None

    def now(self, real: float) -> float:
        """Counted seconds at `real`, which is any clock that does not go back."""
        if self._last is not None:
            self._counted += min(max(0.0, real - self._last), LONGEST_STEP)
        self._last = real
        return self._counted
