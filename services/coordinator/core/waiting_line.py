"""The requests that wait for an engine: by model, better priority first, then by arrival."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from shared.ids import ModelName, RequestId
from shared.messages.generation import Generation


@dataclass(slots=True, eq=False)
class Waiting:
    generation: Generation
    since: float
    """Monotonic seconds."""
    number: int
    told: float | None = None
    """When the gateway last heard that this waits; None: not yet."""

    def __lt__(self, other: Waiting) -> bool:
        return self._key() < other._key()

    def _key(self) -> tuple[int, float, int]:
        return self.generation.priority, self.generation.arrival, self.number


class WaitingLine:
    """Owns the waiting requests; one entry a request. The caller keeps the bound."""

    def __init__(self) -> None:
        self._lines: dict[ModelName, list[Waiting]] = {}
        self._by_request: dict[RequestId, Waiting] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._by_request.values())

    def __contains__(self, request: RequestId) -> bool:
        return request in self._by_request

    def models(self) -> list[ModelName]:
        return list(self._lines)

    def of(self, model: ModelName) -> list[Waiting]:
        """Those who wait for `model`, in order; a copy, so that the caller may remove while it reads."""
        return list(self._lines.get(model, ()))

    def add(self, generation: Generation, now: float) -> Waiting:
        """Puts a request in its place. An older attempt of the same request gives way."""
        self.remove(generation.request)
        waiting = Waiting(generation, now, self._number)
        self._number += 1
        insort(self._lines.setdefault(generation.model, []), waiting)
        self._by_request[generation.request] = waiting
        return waiting

    def get(self, request: RequestId) -> Waiting | None:
        return self._by_request.get(request)

    def remove(self, request: RequestId) -> Waiting | None:
        waiting = self._by_request.pop(request, None)
        if waiting is not None:
            line = self._lines[waiting.generation.model]
            line.remove(waiting)
            if not line:
                del self._lines[waiting.generation.model]
        return waiting

    def clear(self) -> list[Generation]:
        """Empties the line, and answers with who stood there, in order."""
        everyone = [w.generation for line in self._lines.values() for w in line]
        self._lines.clear()
        self._by_request.clear()
        return everyone
