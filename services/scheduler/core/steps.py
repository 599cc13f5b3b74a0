"""Which steps are on their way: numbers, the one that is overdue, the ones that were lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

from services.scheduler.core.events import RankProgress
from services.scheduler.core.pace import Pace
from shared.ids import Incarnation, SequenceId

REPORT_APART = 0.4
"""Seconds between two reports of a rank that are compared; anything that was sent before the first has arrived by
the second."""


class Expected(NamedTuple):
    """What is known of a step in flight: tokens drawn for certain and computed at the most, and beyond those what each
    sequence may yield."""

    samples: int
    tokens: int
    extras: Mapping[SequenceId, int]
    prefills: bool


class _Seen(NamedTuple):
    at: float
    issued: int
    """Plans that had been issued when the report came."""
    published: int
    """Results that the report says were sent."""


class Steps:
    """Owns the numbering of one epoch's plans. (epoch, step) are consecutive from step 0."""

    def __init__(self, epoch: Incarnation, pace: Pace) -> None:
        self.epoch = epoch
        self.issued = 0
        self.finished = 0
        self._expected: deque[Expected] = deque()
        self._pace = pace
        self._awaited_since = 0.0
        self._seen: dict[int, _Seen] = {}

    @property
    def in_flight(self) -> int:
        return self.issued - self.finished

    def issue(self, expected: Expected, now: float) -> int:
        """The next plan's number."""
        self._expected.append(expected)
        if self.in_flight == 0:
            self._awaited_since = now
        self.issued += 1
        return self.issued - 1

    def finish(self, samples: int, now: float) -> Expected:
        """The oldest step in flight has its result. Raises ValueError where a sequence's tokens are missing: it would
        wait for them for ever."""
        expected = self._expected.popleft()
        if samples != expected.samples:
            raise ValueError(f"step {self.finished}: {samples} sampled, {expected.samples} were planned")
        self._pace.took(expected.tokens, now - self._awaited_since)
        self.finished += 1
        self._awaited_since = now
        return expected

    def next_due(self, stages: int) -> float:
        """When the plan behind those in flight should be made, on workers that compute `stages` plans at a time. Past,
        where fewer are in flight."""
        ahead = len(self._expected) - (stages - 1)
        if ahead <= 0:
            return self._awaited_since
        sizes = (expected.tokens for expected in islice(self._expected, ahead))
        return self._awaited_since + self._pace.patience(*sizes)

    def overdue(self, now: float, timeout: float) -> bool:
        return self.in_flight > 0 and now - self._awaited_since > timeout

    def lost(self, report: RankProgress, now: float) -> str | None:
        """What a rank's report shows to be lost, if anything.

        A gap is seen when the next message comes; but with as many plans in flight as may be, none does. So each
        report is compared with how things stood at the one before: plans issued by then must have arrived by
        now, results sent by then must have been heard.
        """
        before = self._seen.get(report.rank)
        if before is not None and now - before.at < REPORT_APART:
            return None
        current = report.epoch == self.epoch
        received, published = (report.received, report.published) if current else (0, 0)
        self._seen[report.rank] = _Seen(now, self.issued, published)
        if before is not None and received < before.issued:
            return f"rank {report.rank} never received step {received}"
        if before is not None and self.finished < before.published:
            return f"the result of step {self.finished} never came"
        return None
