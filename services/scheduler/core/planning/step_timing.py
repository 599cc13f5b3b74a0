"""The steps in flight: how long they take, and which were lost. The next plan is timed by it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

from services.scheduler.core.events import RankProgress
from shared.ids import Incarnation, SequenceId
from shared.messages.scheduler import StepTiming
from shared.messages.worker import SequenceWork
from shared.reliability.step_times import StepTimes, deadline_of

MIN_REPORT_INTERVAL = 0.4
"""Seconds between two reports of a rank that are compared. Anything sent before the first has arrived by the second."""
MIN_LEAD = 0.006
"""Seconds before the end of a step by which the next plan must be sent. It takes 1 to 2 ms on a quiet machine to arrive
and be prepared; the rest covers pauses of the processes involved."""
FIRST_STEP = 10.0
"""How much longer the first step of an epoch may take than the shortest deadline."""
MIN_DELAY = 0.001
"""Shorter delays, in seconds, are not worth waiting for: timers are no finer."""


class ExpectedResult(NamedTuple):
    """What is known of a step in flight: how many sequences draw a token, how many tokens it computes at most, how
    many extra tokens each sequence may yield, and how many sequences decode in it."""

    samples: int
    tokens: int
    extras: Mapping[SequenceId, int]
    prefills: bool
    decodes: int = 0


RECENT_STEPS = 48
"""Finished steps that an epoch remembers, to be looked at."""


class FinishedStep(NamedTuple):
    """A step that was finished, as little of it as can be noted in a microsecond."""

    step: int
    work: tuple[SequenceWork, ...]
    decodes: int
    """The first of `work` are decodes."""
    seconds: float
    timing: StepTiming
    drafted: int
    accepted: tuple[int, ...]
    """As in `StepFinished`."""


class MissedPlan(NamedTuple):
    """A plan that a rank has not received."""

    rank: str
    step: int


class _RankReport(NamedTuple):
    at: float
    issued: int
    """Plans that had been issued when the report came."""
    published: int
    """Results that the report says were sent."""


class StepsInFlight:
    """Owns the numbering of one epoch's plans, consecutive from step 0, and how long the last steps took.

    A plan that is sent early shuts out the requests that arrive while the steps before it run. Sent in time, but not
    before, it still finds the device busy, and holds the requests that arrived in half a step more. So plans run as far
    ahead as short steps need, and long steps do not pay for that.
    """

    def __init__(self, epoch: Incarnation) -> None:
        self.epoch = epoch
        self.issued = 0
        self.finished = 0
        self._expected: deque[ExpectedResult] = deque()
        self._times = StepTimes()
        """Of the last steps, by their size in tokens rounded to a power of two."""
        self._awaited_since = 0.0
        self.last_seconds = 0.0
        """How long the step took whose result came last."""
        self._reports: dict[int, _RankReport] = {}

    @property
    def in_flight(self) -> int:
        """Plans that were issued and have no result yet."""
        return self.issued - self.finished

    @property
    def awaited_since(self) -> float | None:
        """Since when the result of the oldest step in flight is awaited; None with none in flight."""
        return None if self.issued == self.finished else self._awaited_since

    def issue(self, expected: ExpectedResult, now: float) -> int:
        """Records that a plan is sent; returns its number."""
        self._expected.append(expected)
        if self.issued == self.finished:
            self._awaited_since = now
        self.issued += 1
        return self.issued - 1

    def finish(self, samples: int, now: float) -> ExpectedResult:
        """Records the result of the oldest step in flight. Raises ValueError if a sequence's tokens are missing, which
        would wait for them for ever."""
        expected = self._expected.popleft()
        if samples != expected.samples:
            raise ValueError(f"step {self.finished}: {samples} sampled, {expected.samples} were planned")
        self.last_seconds = now - self._awaited_since
        self._times.record(expected.tokens, self.last_seconds)
        self.finished += 1
        self._awaited_since = now
        return expected

    def next_due(self, stages: int) -> float:
        """When the next plan should be made, if workers compute `stages` plans at a time. It is in the past if fewer
        are in flight.

        The plan is due when the last step in flight is half over, assuming that each takes as long as the shortest
        recent one of its size, but at least MIN_LEAD before its end. It is due at once if a size was not seen yet.
        """
        ahead = len(self._expected) - (stages - 1)
        seconds = last = 0.0
        for expected in islice(self._expected, max(0, ahead)):
            last = self._times.shortest(expected.tokens)
            if not last:
                return self._awaited_since
            seconds += last
        if not last:
            return self._awaited_since
        seconds -= max(last / 2, MIN_LEAD)
        return self._awaited_since + (seconds if seconds > MIN_DELAY else 0.0)

    def overdue(self, now: float, shortest: float) -> float | None:
        """The seconds that the oldest step in flight was allowed, where it has taken longer; None otherwise.

        No deadline is shorter than `shortest` seconds, and the first step's is FIRST_STEP times that. A rank finds out
        by itself, and sooner, when its device hangs: this is for results that are lost in another way.
        """
        if self.issued == self.finished or now - self._awaited_since <= shortest:
            return None
        allowed = self.seconds_allowed(shortest)
        return allowed if now - self._awaited_since > allowed else None

    def seconds_allowed(self, shortest: float) -> float:
        """The seconds that the oldest step in flight may take, as `overdue` counts them; 0 with none in flight."""
        if self.issued == self.finished:
            return 0.0
        tokens, first = self._expected[0].tokens, FIRST_STEP * shortest
        return deadline_of(self._times, tokens, shortest=shortest, unseen=shortest, first=first)

    def find_loss(self, report: RankProgress, now: float) -> MissedPlan | str | None:
        """The loss that a rank's report shows: a plan, or (a text) a result; None without one.

        A gap is seen when the next message comes; but with as many plans in flight as may be, none does. So each
        report is compared with how things stood at the one before: plans issued by then must have arrived by
        now, and results sent by then must have been received.
        """
        before = self._reports.get(report.rank)
        if before is not None and now - before.at < MIN_REPORT_INTERVAL:
            return None
        current = report.epoch == self.epoch
        received, published = (report.received, report.published) if current else (0, 0)
        self._reports[report.rank] = _RankReport(now, self.issued, published)
        if before is not None and received < before.issued:
            return MissedPlan(f"rank {report.rank}", received)
        if before is not None and self.finished < before.published:
            return f"the result of step {self.finished} never came"
        return None
