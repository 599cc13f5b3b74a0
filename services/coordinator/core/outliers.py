"""Engines on which requests keep failing, found by those that come again, and which of all suspects get no requests:
outlier detection and ejection, as Envoy and gRPC have it.

An engine that fails what it gets is empty soon, and so the cheapest. What failed there has to weigh more than its load.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.ids import EngineId, InstanceId, RequestId
from shared.messages.lifecycle import EngineHealth

WINDOW = 10.0
"""Seconds for which placements and failures count."""
MIN_FAILURES = 5
MIN_ROUNDS = 3
"""Failures that happened at one moment, such as those of a lost epoch, are one round: each later round is of a request
that was placed after the last one began."""
MIN_SHARE = 0.5
"""Failures over placements, from which on an engine is an outlier."""
ROUND_SECONDS = 1.0
"""After which a failure is of a new round where another coordinator had placed its request, nobody knows when."""
MAX_COUNTED = 1024
"""Placements, and failures, of an engine that are remembered."""


@dataclass(slots=True)
class _EngineRecord:
    placements: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_COUNTED))
    failures: dict[RequestId, float] = field(default_factory=dict)
    """When each request that failed here came again; once each, however often it did."""
    rounds: deque[float] = field(default_factory=lambda: deque(maxlen=MIN_ROUNDS))

    def expire(self, now: float) -> None:
        """Forgets what is older than the window."""
        oldest = now - WINDOW
        for times in (self.placements, self.rounds):
            while times and times[0] < oldest:
                times.popleft()
        while self.failures and (first := next(iter(self.failures.items())))[1] < oldest:
            del self.failures[first[0]]


class OutlierDetector:
    """Owns what was placed on each engine in the last seconds, and what failed there, as far as this coordinator sees
    it. Several coordinators share requests by chance, so each sees equal parts of both."""

    def __init__(self) -> None:
        self._records: defaultdict[EngineId, _EngineRecord] = defaultdict(_EngineRecord)

    def record_placement(self, engine: EngineId, now: float) -> None:
        """A request was placed there."""
        self._records[engine].placements.append(now)

    def record_failure(self, engine: EngineId, request: RequestId, placed: float | None, now: float) -> None:
        """A request comes again that failed on `engine`, where it had come at `placed`, if that is known."""
        record = self._records[engine]
        record.expire(now)
        if request in record.failures or len(record.failures) >= MAX_COUNTED:
            return
        record.failures[request] = now
        last = record.rounds[-1] if record.rounds else None
        if last is None or (placed > last if placed is not None else now - last >= ROUND_SECONDS):
            record.rounds.append(now)

    def exonerate(self, request: RequestId) -> None:
        """The request has failed on several engines: that speaks against itself, not against them."""
        for record in self._records.values():
            record.failures.pop(request, None)

    def evidence(self, engine: EngineId, now: float) -> str | None:
        """What shows that the engine fails, for people; None where nothing does."""
        record = self._records.get(engine)
        if record is None:
            return None
        record.expire(now)
        failures, placements = len(record.failures), len(record.placements)
        if failures < MIN_FAILURES or len(record.rounds) < MIN_ROUNDS or failures < MIN_SHARE * placements:
            return None
        return f"{failures} requests failed in {WINDOW:g} s, of {max(failures, placements)}"

    def forget(self, engine: EngineId) -> None:
        """What was seen of it counts no more: it was said, or its process is another one."""
        self._records.pop(engine, None)


ACCUSED = EngineHealth(suspect="requests failed there, and it has not said yet that it knows")
"""The health of an engine that this coordinator has just told so: its own report follows in a moment."""
UNHEARD = EngineHealth(suspect="a request came again from there, and nothing was heard of it since that was placed")
"""The health of an engine that may hang: its next report says otherwise."""
UNHEARD_SECONDS = 4.0
"""A request that comes again sooner was failed by somebody, who lives; who waits in vain for an answer takes longer."""


class RatedEngine(NamedTuple):
    """An engine that is ready, and its health as far as is known."""

    instance: InstanceId
    health: EngineHealth | None


def choose_ejected(engines: Collection[RatedEngine], max_share: float) -> frozenset[InstanceId]:
    """The suspects among the engines of one model, `max_share` of all at most and never the last one.

    Where there are more suspects the worst go: those with the most faulty canaries, then those that were suspects most
    often, then by name. All coordinators see the same reports, so they agree without talking of it.
    """
    suspects = [each for each in engines if each.health is not None and each.health.suspect is not None]
    most = min(int(max_share * len(engines)), len(engines) - 1)
    return frozenset(each.instance for each in sorted(suspects, key=_badness)[: max(0, most)])


def _badness(engine: RatedEngine) -> tuple[int, int, str]:
    health = engine.health or EngineHealth()
    return -health.faults, -health.ejections, engine.instance
