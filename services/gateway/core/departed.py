"""Remembers requests whose clients left, so that an engine which missed the cancel is told again."""

from __future__ import annotations

from collections import OrderedDict

from services.gateway.core.effects import Stop
from shared.ids import Attempt, EngineId, RequestId
from shared.messages.scheduler import Cancel


class Departed:
    """Owns the last `limit` departed requests: where each was, and when its cancel was last sent."""

    def __init__(self, limit: int, again_after: float) -> None:
        self._limit, self._again_after = limit, again_after
        self._entries: OrderedDict[RequestId, tuple[EngineId, float]] = OrderedDict()

    def add(self, request: RequestId, engine: EngineId, now: float) -> None:
        self._entries[request] = (engine, now)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def heard_of(self, request: RequestId, attempt: Attempt, now: float) -> list[Stop]:
        """Tokens of `request` came: its engine goes on with it."""
        entry = self._entries.get(request)
        if entry is None or now - entry[1] < self._again_after:
            return []
        self._entries[request] = (entry[0], now)
        return [Stop(entry[0], Cancel(request, attempt))]
