"""The requests that wait until an engine can take them: by model, better priority first, then by arrival."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from shared.ids import ModelName, RequestId
from shared.messages.generation import Generation


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One request in the queue. Sorts by priority, arrival at the gateway, arrival here."""

    generation: Generation
    since: float
    """When it came here, in monotonic seconds."""
    number: int
    notified: float | None = None
    """When its gateway was last notified that it waits; None: not yet."""

    def __lt__(self, other: QueuedRequest) -> bool:
        return self._key() < other._key()

    def _key(self) -> tuple[int, float, int]:
        return self.generation.priority, self.generation.arrival, self.number


class PlacementQueue:
    """Owns the waiting requests, one entry a request. The caller keeps the bound."""

    def __init__(self) -> None:
        self._by_model: dict[ModelName, list[QueuedRequest]] = {}
        self._by_request: dict[RequestId, QueuedRequest] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._by_request.values())

    def __contains__(self, request: RequestId) -> bool:
        return request in self._by_request

    def models(self) -> list[ModelName]:
        """The models that at least one request waits for."""
        return list(self._by_model)

    def of(self, model: ModelName) -> list[QueuedRequest]:
        """The requests that wait for `model`, in order. It is a copy, so the caller may remove requests while
        iterating."""
        return list(self._by_model.get(model, ()))

    def add(self, generation: Generation, now: float) -> QueuedRequest:
        """Puts a request in its place. It replaces an older attempt of the same request."""
        self.remove(generation.request)
        queued = QueuedRequest(generation, now, self._number)
        self._number += 1
        insort(self._by_model.setdefault(generation.model, []), queued)
        self._by_request[generation.request] = queued
        return queued

    def get(self, request: RequestId) -> QueuedRequest | None:
        """The entry of `request`; None where it does not wait here."""
        return self._by_request.get(request)

    def remove(self, request: RequestId) -> QueuedRequest | None:
        """Takes `request` out, and answers with its entry; None where it did not wait here."""
        queued = self._by_request.pop(request, None)
        if queued is not None:
            same_model = self._by_model[queued.generation.model]
            same_model.remove(queued)
            if not same_model:
                del self._by_model[queued.generation.model]
        return queued

    def clear(self) -> list[Generation]:
        """Empties the queue, and answers with the requests that it held, in order."""
        everyone = [queued.generation for same_model in self._by_model.values() for queued in same_model]
        self._by_model.clear()
        self._by_request.clear()
        return everyone
