"""The prompts that wait for a prefill engine to pull them, and how much each engine has asked for.

A pull is a number of prompt tokens that an engine computes next; it replaces the engine's pull before, and counts until
it is used, taken back, or the engine is gone. Prompts go to engines that asked, in the queue's order, which is fair
between API keys. What is lost on its way is asked for again.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.coordinator.core.placement_queue import PlacementQueue, QueuedRequest
from shared.ids import EngineId, ModelName, RequestId
from shared.messages.generation import Generation


class PrefillQueue:
    """Owns the waiting prompts and the pulls. The caller keeps the bound, and the deadline."""

    def __init__(self) -> None:
        self._queue = PlacementQueue()
        self._tokens: dict[RequestId, int] = {}
        self._asked: dict[EngineId, int] = {}
        """Tokens that an engine asked for and has not been given."""

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._queue)

    @property
    def tokens(self) -> int:
        """Tokens to compute of all waiting prompts."""
        return sum(self._tokens.values())

    def models(self) -> list[ModelName]:
        """Those that a prompt waits for."""
        return self._queue.models()

    def in_order(self, model: ModelName) -> Iterator[QueuedRequest]:
        """The prompts for `model`, in the order in which they are to be given out; the caller may take them out."""
        return self._queue.in_order(model)

    def get(self, request: RequestId) -> QueuedRequest | None:
        """The entry of `request`; None where it does not wait here."""
        return self._queue.get(request)

    def add(self, generation: Generation, tokens: int, since: float) -> QueuedRequest:
        """A prompt waits, of which `tokens` are left to compute; it replaces an older attempt."""
        self._tokens[generation.request] = tokens
        return self._queue.add(generation, since)

    def remove(self, request: RequestId, *, placed: bool = False) -> QueuedRequest | None:
        """Takes `request` out, and answers with its entry; None where it did not wait here."""
        self._tokens.pop(request, None)
        return self._queue.remove(request, placed=placed)

    def settle(self, request: RequestId, generated: int) -> None:
        """A request of a key has ended: see `PlacementQueue.settle`."""
        self._queue.settle(request, generated)

    def clear(self) -> list[Generation]:
        """Empties the queue, and answers with what it held, in order."""
        self._tokens.clear()
        return self._queue.clear()

    # ---- pulls

    def record_pull(self, engine: EngineId, tokens: int) -> None:
        """The engine computes so many tokens next; 0: it has enough."""
        if tokens > 0:
            self._asked[engine] = tokens
        else:
            self._asked.pop(engine, None)

    def room_of(self, engine: EngineId) -> int:
        """Tokens that the engine has asked for and not been given; 0 or less for none."""
        return self._asked.get(engine, 0)

    def give(self, engine: EngineId, request: RequestId) -> None:
        """A prompt goes to the engine. One that is longer than what was asked for goes whole."""
        self._asked[engine] -= self._tokens[request]
        self.remove(request, placed=True)

    def forget(self, engine: EngineId) -> None:
        """The engine is gone."""
        self._asked.pop(engine, None)
