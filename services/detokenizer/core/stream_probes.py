"""Decides when to probe an engine that a stream has moved to, but that sends no tokens for it.

The request may have been lost on its way there, and then no process would end the stream. Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from services.detokenizer.core.stream import RequestStream
from shared.ids import Attempt, EngineId, RequestId
from shared.messages.scheduler import ProbeReply

PROBE_AFTER = 10.0
"""Seconds without tokens after which an engine is probed, and probed again; a request may well wait that long there."""
DENIAL_INTERVAL = 1.0
"""Seconds between two denials that count: the last tokens may have been on their way at the first."""
MAX_DENIALS = 2
"""After so many the request counts as lost."""
MAX_PROBES = 64
"""Sent at a time; the other streams come later."""

NoReply = Literal["nobody there", "no reply in time"]


class StreamProbe(NamedTuple):
    """An action: ask that engine whether it has the request."""

    engine: EngineId
    request: RequestId
    attempt: Attempt


@dataclass(slots=True)
class _AwaitedStream:
    attempt: Attempt
    engine: EngineId
    probe_at: float
    denials: int = 0


class StreamProbes:
    """Owns since when each stream that moved is awaited, and how often its engine did not know the request."""

    def __init__(self) -> None:
        self._awaited: dict[RequestId, _AwaitedStream] = {}

    def due(self, streams: Iterable[RequestStream], now: float) -> list[StreamProbe]:
        """The probes to send now, for all streams that there are; each is sent again after `PROBE_AFTER`."""
        before, self._awaited = self._awaited, {}
        for stream in streams:
            if stream.awaited:
                request, attempt = stream.opened.request, stream.opened.attempt
                entry = before.get(request)
                if entry is None or (entry.attempt, entry.engine) != (attempt, stream.engine):
                    entry = _AwaitedStream(attempt, stream.engine, now + PROBE_AFTER)
                self._awaited[request] = entry
        due = [(request, entry) for request, entry in self._awaited.items() if entry.probe_at <= now][:MAX_PROBES]
        for _, entry in due:
            entry.probe_at = now + PROBE_AFTER
        return [StreamProbe(entry.engine, request, entry.attempt) for request, entry in due]

    def replied(self, probe: StreamProbe, reply: ProbeReply | NoReply, now: float) -> bool:
        """Whether the request is lost: its engine does not know it, and did not know it a while ago."""
        entry = self._awaited.get(probe.request)
        if entry is None or (entry.attempt, entry.engine) != (probe.attempt, probe.engine):
            return False
        match reply:
            case ProbeReply(state="waiting" | "running"):
                entry.denials = 0
            case ProbeReply() | "nobody there":
                entry.denials += 1
                entry.probe_at = now + DENIAL_INTERVAL
            case "no reply in time":
                pass  # whether the engine lives, its heartbeats show
        return entry.denials >= MAX_DENIALS
