"""How often each process says how it is, so that hearing a fleet of any size costs the same. No clock, no bus."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from shared.messages.kv_events import KV_EVENT_SECONDS
from shared.messages.lifecycle import KEEP_ALIVE_SECONDS, MAX_KEEP_ALIVE_SECONDS, HeartbeatInterval, Lifecycle

REPEAT_SECONDS = 10.0
"""Between two messages that say the same: for processes that have come since, and as one may be lost."""
MAX_KV_EVENT_SECONDS = 2.0
"""For which changes of blocks are gathered at the most, however large the fleet."""
SHRUNK = 0.75
"""Share of a step of the interval, from its beginning, above which a fleet that shrinks keeps it: an engine that comes
and goes changes nothing."""


def interval_for(processes: int, budget: float) -> float:
    """Seconds between two messages of each of so many that say the same: a power of two, at most
    MAX_KEEP_ALIVE_SECONDS, by which all say no more than `budget` a second."""
    return _doubled(KEEP_ALIVE_SECONDS, processes / budget, MAX_KEEP_ALIVE_SECONDS)


def kv_interval_for(sources: int, budget: float) -> float:
    """Seconds for which each of so many engines and KV stores gathers changes of its blocks: KV_EVENT_SECONDS times a
    power of two, at most MAX_KV_EVENT_SECONDS, by which all publish no more than `budget` times a second."""
    return _doubled(KV_EVENT_SECONDS, sources / budget, MAX_KV_EVENT_SECONDS)


class FleetHeartbeat:
    """Owns what was last said of the interval, and when.

    Heartbeats at a rate of one over the number of members, as Serf and Cassandra scale what all hear by the size of the
    cluster: the interval doubles each time that more than `budget` messages a second would come from one service; and
    so does that of block events, by a budget of their own.
    """

    def __init__(self, budget: float, kv_budget: float) -> None:
        """`budget`: messages a second of one service's processes, while nothing changes; `kv_budget`: block events a
        second of all engines and KV stores, while all of them change."""
        self._budget = budget
        self._kv_budget = kv_budget
        self._interval = HeartbeatInterval(KEEP_ALIVE_SECONDS, KV_EVENT_SECONDS)
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
        return interval

    def _of(self, lives: Iterable[Lifecycle]) -> HeartbeatInterval:
        """While there is a process that says it twice a second, which releases do that know no promises, all must say
        it as often as they ever did: silence means death to it."""
        processes: Counter[str] = Counter()
        promises = True
        for life in lives:
            promises = promises and life.keep_alive >= KEEP_ALIVE_SECONDS
            processes[life.service] += 1
        most = max(processes.values(), default=0)
        keep_alive = interval_for(most, self._budget) if promises else KEEP_ALIVE_SECONDS
        if promises and _still_fits(self._interval.keep_alive, most / self._budget):
            keep_alive = self._interval.keep_alive
        sources = processes["scheduler"] + processes["kvstore"]
        if _still_fits(self._interval.kv_events, sources / self._kv_budget):
            return HeartbeatInterval(keep_alive, self._interval.kv_events)
        return HeartbeatInterval(keep_alive, kv_interval_for(sources, self._kv_budget))


def _doubled(shortest: float, wanted: float, longest: float) -> float:
    return min(longest, shortest * 2.0 ** math.ceil(math.log2(max(shortest, wanted) / shortest)))


def _still_fits(interval: float, wanted: float) -> bool:
    return interval / 2 * SHRUNK < wanted <= interval
