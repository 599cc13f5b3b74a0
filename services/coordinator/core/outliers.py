"""Engines on which requests keep failing, found by those that come again: outlier detection, as Envoy and gRPC have it.

An engine that fails what it gets is empty soon, and so the cheapest. What failed there has to weigh more than its load.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from shared.ids import EngineId, RequestId

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
        self._records: dict[EngineId, _EngineRecord] = {}

    def record_placement(self, engine: EngineId, now: float) -> None:
        """A request was placed there."""
        self._record(engine).placements.append(now)

    def record_failure(self, engine: EngineId, request: RequestId, placed: float | None, now: float) -> None:
        """A request comes again that failed on `engine`, where it had come at `placed`, if that is known."""
        record = self._record(engine)
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

    def _record(self, engine: EngineId) -> _EngineRecord:
        record = self._records.get(engine)
        if record is None:
            record = self._records[engine] = _EngineRecord()
        return record
