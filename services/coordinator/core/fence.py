"""Which attempt of each request is the newest, so that stale ones are dropped."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from shared.ids import Attempt, EngineId, RequestId


@dataclass(slots=True)
class _Seen:
    taken: int = 0
    withdrawn: int = 0
    """Attempts up to this one are wanted no more. Attempts count from 1."""
    engine: EngineId | None = None
    """Where attempt `taken` went last."""


class Fence:
    """Owns the newest attempt of the last `remembered` requests. Each attempt is taken once."""

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self._seen: OrderedDict[RequestId, _Seen] = OrderedDict()

    def take(self, request: RequestId, attempt: Attempt) -> bool:
        """Takes an attempt in; False where it is stale: withdrawn, taken before, or older than one taken."""
        seen = self._entry(request)
        if attempt <= max(seen.taken, seen.withdrawn):
            return False
        seen.taken, seen.engine = attempt, None
        return True

    def wants(self, request: RequestId, attempt: Attempt) -> bool:
        """Whether an attempt taken before is still the newest, and not withdrawn."""
        seen = self._seen.get(request)
        return seen is None or (attempt >= seen.taken and attempt > seen.withdrawn)

    def withdraw(self, request: RequestId, attempt: Attempt) -> None:
        seen = self._entry(request)
        seen.withdrawn = max(seen.withdrawn, attempt)

    def placed(self, request: RequestId, engine: EngineId) -> None:
        self._entry(request).engine = engine

    def engine_of(self, request: RequestId) -> EngineId | None:
        seen = self._seen.get(request)
        return seen.engine if seen else None

    def release(self, request: RequestId) -> None:
        """Forgets that an attempt was taken here: another coordinator gets it, and may give it back."""
        self._entry(request).taken = 0

    def _entry(self, request: RequestId) -> _Seen:
        seen = self._seen.setdefault(request, _Seen())
        self._seen.move_to_end(request)
        while len(self._seen) > self._remembered:
            self._seen.popitem(last=False)
        return seen
