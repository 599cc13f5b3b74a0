"""The load of an interval, from the counters that engines report at its two ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from services.planner.core.sizing import RequestLoad
from shared.ids import EngineId
from shared.messages.lifecycle import EngineReport, Role

MAX_KNOWN = 4096
"""Engines whose counters are kept, those that have gone included: one that comes back has not begun anew."""


class FleetObservation(NamedTuple):
    """What is known of a fleet at a moment."""

    reports: Mapping[EngineId, EngineReport]
    """Of all engines that answer requests, those that are drained included."""
    present: Mapping[Role, int]
    """Engines of each role that take requests, or will once they have started."""
    queued: int
    """Requests that wait at coordinators."""


class LoadInterval(NamedTuple):
    """What has happened between two observations."""

    seconds: float
    arrivals: int
    """Requests that came, whether they have begun or wait."""
    first_tokens: int
    """Requests that got their first token."""
    prompt_tokens: int
    """Of requests that entered a step."""
    cached_tokens: int
    """How many of these a cache held."""
    output_tokens: int
    ttft: float | None
    """Mean seconds from a request's coming to its engine to its first token; None: there was none."""
    itl: float | None
    """Mean seconds from token to token; None: there was none."""
    backlog: int
    """Requests that wait at its end, at coordinators or in engines."""


class _Counts(NamedTuple):
    """Counters of an engine, or their growth."""

    first_tokens: int
    first_seconds: float
    later_tokens: int
    later_seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, report: EngineReport) -> _Counts:
        sums = report.latency
        latency = (0, 0.0, 0, 0.0) if sums is None else (
            sums.first_tokens, sums.first_token_seconds, sums.later_tokens, sums.later_token_seconds
        )  # fmt: skip
        return cls(*latency, report.prompt_tokens, report.cached_tokens, report.tokens)

    def since(self, before: _Counts) -> _Counts:
        """All of it, where the engine has begun anew since."""
        if self.output_tokens < before.output_tokens or self.first_tokens < before.first_tokens:
            return self
        return _Counts._make(max(0, now - then) for now, then in zip(self, before, strict=True))


_NOTHING = _Counts(0, 0.0, 0, 0.0, 0, 0, 0)


class LoadMeter:
    """Owns the counters at the latest observation."""

    def __init__(self) -> None:
        self._counts: dict[EngineId, _Counts] = {}
        self._backlog = 0
        self._at: float | None = None

    def measure(self, seen: FleetObservation, now: float) -> LoadInterval | None:
        """The load since the call before; None at the first call. An engine that is new since then has begun with
        zeros; at the first call nobody knows."""
        before, self._at = self._at, now
        grown = _NOTHING
        for engine, report in seen.reports.items():
            counts = _Counts.of(report)
            growth = counts.since(self._counts.pop(engine, _NOTHING))
            grown = _Counts._make(a + b for a, b in zip(grown, growth, strict=True))
            self._counts[engine] = counts
        while len(self._counts) > MAX_KNOWN:
            del self._counts[next(iter(self._counts))]
        backlog = seen.queued + sum(report.waiting for report in seen.reports.values())
        waits, self._backlog = backlog - self._backlog, backlog
        if before is None or now <= before:
            return None
        return LoadInterval(
            seconds=now - before,
            arrivals=max(0, grown.first_tokens + waits),
            first_tokens=grown.first_tokens,
            prompt_tokens=grown.prompt_tokens,
            cached_tokens=grown.cached_tokens,
            output_tokens=grown.output_tokens,
            ttft=grown.first_seconds / grown.first_tokens if grown.first_tokens else None,
            itl=grown.later_seconds / grown.later_tokens if grown.later_tokens else None,
            backlog=backlog,
        )


class RequestShape:
    """Owns the lengths of the latest requests: what comes next is taken to be like them, on average."""

    INTERVALS = 20
    """As many of the latest intervals as had requests."""

    def __init__(self) -> None:
        self._intervals: deque[LoadInterval] = deque(maxlen=self.INTERVALS)

    def record(self, interval: LoadInterval) -> None:
        """What is looked at from now on."""
        if interval.first_tokens or interval.output_tokens:
            self._intervals.append(interval)

    def at(self, rate: float) -> RequestLoad | None:
        """So many such requests per second; None before there was one."""
        requests = sum(each.first_tokens for each in self._intervals)
        if not requests:
            return None
        prompt = sum(each.prompt_tokens for each in self._intervals) / requests
        cached = sum(each.cached_tokens for each in self._intervals) / requests
        output = sum(each.output_tokens for each in self._intervals) / requests
        return RequestLoad(rate, max(1.0, prompt - cached), cached, max(1.0, output))
