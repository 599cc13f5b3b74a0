"""When a store that lets questions time out is left alone for a while. Knows no questions."""

from __future__ import annotations

UNANSWERED = 3
"""In a row, and for `SILENT` at least; some may be late because the machine is busy."""
SILENT = 1.0
"""Seconds."""
REST = 1.0
"""Seconds without a question; then one more tells whether it answers again. Doubled each time that it does not."""
LONGEST_REST = 16.0


class StoreBreaker:
    """Owns how often in a row a store did not answer: who waits for one that hangs waits for each question."""

    def __init__(self) -> None:
        self._unanswered = 0
        self._since: float | None = None
        """When the first of them was given up."""
        self._rest = REST
        self._until: float | None = None

    @property
    def open(self) -> bool:
        """Whether it is to be asked nothing."""
        return self._until is not None

    def look_at_clock(self, now: float) -> None:
        if self._until is not None and now >= self._until:
            self._until = None

    def answered(self) -> None:
        self._unanswered, self._since, self._rest, self._until = 0, None, REST, None

    def unanswered(self, now: float) -> None:
        """A question had no answer in its time."""
        self._unanswered += 1
        if self._since is None:
            self._since = now
        if self._unanswered < UNANSWERED or now - self._since < SILENT or self._until is not None:
            return
        self._until = now + self._rest
        self._rest = min(2 * self._rest, LONGEST_REST)
