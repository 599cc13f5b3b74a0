"""When to try again, when to stop trying for a while, and until when to wait. No clock: `now` is an argument.

The breaker is the pattern of Nygard's "Release It!": closed while calls succeed, open while they would only be waited
for, half open for one call that shows whether they succeed again.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_DOUBLINGS = 32
"""So that the pause after a million failures is computed without overflow."""


class Backoff(NamedTuple):
    """Pauses between attempts that double from `first` up to `longest`, both in seconds."""

    first: float
    longest: float

    def pause(self, earlier: int) -> float:
        """Seconds to wait when `earlier` pauses in a row came before this one; `first` for 0."""
        return min(self.longest, self.first * 2.0 ** min(earlier, MAX_DOUBLINGS))


class Deadline(NamedTuple):
    """The time after which the outcome is no longer needed, in seconds on the caller's clock."""

    at: float

    def remaining(self, now: float) -> float:
        """Seconds left; 0 once it has passed."""
        return max(0.0, self.at - now)

    def after(self, now: float, share: float) -> Deadline:
        """The earlier deadline at which `share` (0 to 1) of the time left at `now` is used up."""
        return Deadline(now + share * self.remaining(now))


class CircuitBreaker:
    """Owns how often in a row a peer did not answer, and until when it is therefore not called.

    It opens after `failures` failures in a row that span at least `span` seconds: a few calls that fail at one moment
    may be the fault of a busy machine. It stays open for a pause of `backoff`; then calls are made again, and the
    next failure opens it for a longer pause. A success closes it and resets the pauses.
    """

    def __init__(self, failures: int, span: float, backoff: Backoff) -> None:
        self._min_failures, self._min_span, self._backoff = failures, span, backoff
        self._failures = 0
        self._first_failure: float | None = None
        self._openings = 0
        self._open_until: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether no call should be made, as of the last `update`."""
        return self._open_until is not None

    def update(self, now: float) -> None:
        """Ends a pause that is over; call before `is_open` is read."""
        if self._open_until is not None and now >= self._open_until:
            self._open_until = None

    def record_success(self) -> None:
        """A call was answered, even if late: the peer is there."""
        self._failures, self._first_failure, self._openings, self._open_until = 0, None, 0, None

    def record_failure(self, now: float) -> None:
        """A call was not answered in time. Those under way when the breaker opened do not prolong the pause."""
        self._failures += 1
        if self._first_failure is None:
            self._first_failure = now
        tripped = self._failures >= self._min_failures and now - self._first_failure >= self._min_span
        if tripped and self._open_until is None:
            self._open_until = now + self._backoff.pause(self._openings)
            self._openings += 1
