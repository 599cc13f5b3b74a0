"""Streams that have moved to an engine from which nothing comes: when it is asked whether it has their requests.

The request may have been lost on its way there, and with it whoever would have ended the stream. Pure: time comes as an
argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from services.detokenizer.core.stream import Stream
from shared.ids import Attempt, EngineId, RequestId
from shared.messages.scheduler import Probe, ProbeReply

PATIENCE = 10.0
"""Seconds; a request may well wait for its turn there, and is then asked after again."""
CONFIRM = 1.0
"""Seconds between two doubts: the last tokens may have been on their way at the first."""
DOUBTS = 2
MOST_ASKED = 64
"""At a time; the others' turn comes."""

NoAnswer = Literal["nobody there", "no answer in time"]


class Ask(NamedTuple):
    engine: EngineId
    probe: Probe


@dataclass(slots=True)
class _Awaited:
    attempt: Attempt
    engine: EngineId
    ask_at: float
    doubts: int = 0


class Unclaimed:
    """Owns since when each stream that moved is awaited, and how often its engine did not know the request."""

    def __init__(self) -> None:
        self._awaited: dict[RequestId, _Awaited] = {}

    def due(self, streams: Iterable[Stream], now: float) -> list[Ask]:
        """Whom to ask now, of all streams that there are."""
        before, self._awaited = self._awaited, {}
        for stream in streams:
            if stream.awaited:
                self._note(stream, before.get(stream.opened.request), now)
        due = [(request, entry) for request, entry in self._awaited.items() if entry.ask_at <= now][:MOST_ASKED]
        for _, entry in due:
            entry.ask_at = now + PATIENCE
        return [Ask(entry.engine, Probe(request, entry.attempt)) for request, entry in due]

    def _note(self, stream: Stream, before: _Awaited | None, now: float) -> None:
        attempt = stream.opened.attempt
        same = before is not None and (before.attempt, before.engine) == (attempt, stream.engine)
        entry = before if same and before is not None else _Awaited(attempt, stream.engine, now + PATIENCE)
        self._awaited[stream.opened.request] = entry

    def answered(self, ask: Ask, answer: ProbeReply | NoAnswer, now: float) -> bool:
        """Whether the stream waits for nobody."""
        entry = self._awaited.get(ask.probe.request)
        if entry is None or (entry.attempt, entry.engine) != (ask.probe.attempt, ask.engine):
            return False
        match answer:
            case ProbeReply(state="waiting" | "running"):
                entry.doubts = 0
            case ProbeReply() | "nobody there":
                entry.doubts += 1
                entry.ask_at = now + CONFIRM
            case "no answer in time":
                pass  # whether it lives, its lifecycle tells
        return entry.doubts >= DOUBTS
