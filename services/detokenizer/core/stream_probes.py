"""Decides when to probe an engine that sends no tokens for a stream.

The request may have been lost on its way to an engine that it was handed over to; or its end was lost on the way here,
as in an outage of the bus, and an engine with nothing else to send shows no gap. No process would end such a stream.
Pure: time is an argument.
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
    position: int
    """Output tokens that have arrived."""


@dataclass(slots=True)
class _SilentStream:
    probe: StreamProbe
    probe_at: float
    denials: int = 0


class StreamProbes:
    """Owns since when each stream is silent, and how often its engine did not know the request."""

    def __init__(self) -> None:
        self._silent: dict[RequestId, _SilentStream] = {}

    def due(self, streams: Iterable[RequestStream], now: float) -> list[StreamProbe]:
        """The probes to send now, for all streams that there are; each is sent again after `PROBE_AFTER`."""
        before, self._silent = self._silent, {}
        for stream in streams:
            request = stream.opened.request
            probe = StreamProbe(stream.engine, request, stream.opened.attempt, stream.position)
            entry = before.get(request)
            if entry is None or entry.probe != probe:
                entry = _SilentStream(probe, now + PROBE_AFTER)
            self._silent[request] = entry
        due = [entry for entry in self._silent.values() if entry.probe_at <= now][:MAX_PROBES]
        for entry in due:
            entry.probe_at = now + PROBE_AFTER
        return [entry.probe for entry in due]

    def replied(self, probe: StreamProbe, reply: ProbeReply | NoReply, now: float) -> bool:
        """Whether the request is lost: its engine does not know it, and did not know it a while ago."""
        entry = self._silent.get(probe.request)
        if entry is None or entry.probe != probe:
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
