"""How often each process says how it is, so that hearing a fleet of any size costs the same. No clock, no bus."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from shared.messages.lifecycle import KEEP_ALIVE_SECONDS, MAX_KEEP_ALIVE_SECONDS, HeartbeatInterval, Lifecycle

REPEAT_SECONDS = 10.0
"""Between two messages that say the same: for processes that have come since, and as one may be lost."""
SHRUNK = 0.75
"""Share of a step of the interval, from its beginning, above which a fleet that shrinks keeps it: an engine that comes
and goes changes nothing."""


def interval_for(processes: int, budget: float) -> float:
    """Seconds between two messages of each of so many that say the same: a power of two, at most
    MAX_KEEP_ALIVE_SECONDS, by which all say no more than `budget` a second."""
    wanted = max(KEEP_ALIVE_SECONDS, processes / budget)
    return min(MAX_KEEP_ALIVE_SECONDS, KEEP_ALIVE_SECONDS * 2.0 ** math.ceil(math.log2(wanted / KEEP_ALIVE_SECONDS)))


class FleetHeartbeat:
    """Owns what was last said of the interval, and when.

    Heartbeats at a rate of one over the number of members, as Serf and Cassandra scale what all hear by the size of the
    cluster: the interval doubles each time that more than `budget` messages a second would come from one service.
    """

    def __init__(self, budget: float) -> None:
        """`budget`: messages a second of one service's processes, while nothing changes."""
        self._budget = budget
        self._interval = KEEP_ALIVE_SECONDS
        self._said_at: float | None = None
        """None before anything was to be said: a small fleet is told nothing."""
        self._since: float | None = None

    def due(self, lives: Iterable[Lifecycle], now: float) -> HeartbeatInterval | None:
        """What is to be said now, given every process that is alive; None: nothing. Seconds on the liveness clock.

        Nothing for a while after the first call: a coordinator that has just begun to listen knows only some.
        """
        if self._since is None:
            self._since = now
        if now - self._since < REPEAT_SECONDS:
            return None
        interval = self._of(lives)
        repeats = self._said_at is not None and now - self._said_at >= REPEAT_SECONDS
        if interval == self._interval and not repeats:
            return None
        self._interval, self._said_at = interval, now
        return HeartbeatInterval(interval)

    def _of(self, lives: Iterable[Lifecycle]) -> float:
        """While there is a process that says it twice a second, which releases do that know no promises, all must say
        it as often as they ever did: silence means death to it."""
        processes: Counter[str] = Counter()
        for life in lives:
            if life.keep_alive < KEEP_ALIVE_SECONDS:
                return KEEP_ALIVE_SECONDS
            processes[life.service] += 1
        most = max(processes.values(), default=0)
        if self._interval / 2 * SHRUNK < most / self._budget <= self._interval:
            return self._interval
        return interval_for(most, self._budget)
