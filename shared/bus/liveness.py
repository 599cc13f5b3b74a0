"""A clock that is paused while the bus is unreachable, so that no process is declared dead because of an outage."""

from __future__ import annotations

from collections.abc import Callable


class LivenessClock:
    """Owns how long the bus was away. After a reconnect the clock is paused for `grace` more seconds: other processes
    need a moment to reconnect and to publish their lifecycles."""

    def __init__(self, clock: Callable[[], float], grace: float) -> None:
        self._clock, self._grace = clock, grace
        self._stood_still = 0.0
        self._away_since: float | None = None
        self._outage_began = 0.0
        self._resumes_at = 0.0

    def disconnected(self) -> None:
        """Pauses the clock, because the bus is unreachable. Calling it again changes nothing."""
        if self._away_since is None:
            now = self._clock()
            if now >= self._resumes_at:  # otherwise the earlier outage was only interrupted
                self._outage_began = now
            # What is left of an earlier grace period was counted as standing still in advance.
            self._stood_still -= max(0.0, self._resumes_at - now)
            self._resumes_at = now
            self._away_since = now

    def reconnected(self) -> None:
        """Resumes the clock in `grace` seconds, because the bus is back. Calling it again changes nothing."""
        if self._away_since is not None:
            now = self._clock()
            self._resumes_at = now + self._grace
            self._stood_still += self._resumes_at - self._away_since
            self._away_since = None

    def outage(self) -> float:
        """Seconds for which the bus has been unreachable, by the clock of the wall; 0.0 while it is there. A return for
        less than the grace ends no outage."""
        return 0.0 if self._away_since is None else self._clock() - self._outage_began

    def now(self) -> float:
        """Seconds; never less than before."""
        if self._away_since is not None:
            return self._away_since - self._stood_still
        return max(self._clock(), self._resumes_at) - self._stood_still
