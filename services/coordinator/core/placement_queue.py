"""The requests that wait until an engine can take them: fair between API keys, by priority within each.

Start-time fair queueing (Goyal, Vin, Cheng 1996): each key has a virtual start time for its next request, and the least
one goes first. A request that is placed moves its key's by its tokens divided by the key's weight: by all that it may
generate, and when it has ended that is corrected by what it did. So keys that always have requests waiting get tokens
in the ratio of their weights, and one that comes anew waits for one request of each other key at most, however many
they have waiting.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from shared.ids import ModelName, RequestId
from shared.messages.generation import Generation
from shared.packing import count
from shared.reliability.recent import RecentEntries

MAX_UNSETTLED = 65_536
"""Placed requests of keys that have not ended, as far as is known; the oldest stay counted as they are."""


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One request in the queue. Sorts by priority, arrival at the gateway, arrival here: so within its key."""

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

    @property
    def cost(self) -> float:
        """Its cost: its tokens, with all that it may generate, divided by its key's weight."""
        generation = self.generation
        tokens = generation.prompt_length + generation.stopping.expected_tokens
        return max(1, tokens, count(generation.tokens)) / generation.weight


@dataclass(slots=True, eq=False)
class _Flow:
    """The requests of one key for one model, in order."""

    start: float
    """The virtual start time of its first request."""
    requests: list[QueuedRequest] = field(default_factory=list)


class _ModelQueue:
    """Owns the flows of one model for as long as a request waits for it, and the virtual time."""

    def __init__(self) -> None:
        self.flows: dict[str, _Flow] = {}
        """By key; those with requests."""
        self._now = 0.0
        """The virtual time: the start time of the request that was placed last."""
        self._ahead: dict[str, float] = {}
        """Start times of keys without requests that have had more than their share, so that it counts when they come
        back."""

    def add(self, queued: QueuedRequest) -> None:
        key = queued.generation.key
        flow = self.flows.get(key)
        if flow is None:
            flow = self.flows[key] = _Flow(max(self._now, self._ahead.pop(key, 0.0)))
        insort(flow.requests, queued)

    def remove(self, queued: QueuedRequest, *, placed: bool) -> None:
        key = queued.generation.key
        flow = self.flows[key]
        flow.requests.remove(queued)
        if placed:
            self._now = max(self._now, flow.start)
            flow.start += queued.cost
            self._ahead = {name: start for name, start in self._ahead.items() if start > self._now}
        if not flow.requests:
            del self.flows[key]
            if flow.start > self._now:
                self._ahead[key] = flow.start

    def settle(self, key: str, excess: float) -> None:
        """The key was counted for `excess` more than it had (less, where negative). What it gets back never puts it
        behind the virtual time: nobody saves up a share."""
        flow = self.flows.get(key)
        if flow is not None:
            flow.start = max(min(flow.start, self._now), flow.start - excess)
        elif (start := self._ahead.pop(key, self._now) - excess) > self._now:
            self._ahead[key] = start

    def in_order(self) -> Iterator[QueuedRequest]:
        """Equal start times go by arrival."""
        heads = [_Head(flow.start, list(flow.requests)) for flow in self.flows.values()]
        heapify(heads)
        while heads:
            yield heads[0].request
            following = heads[0].following()
            if following is None:
                heappop(heads)
            else:
                heapreplace(heads, following)


@dataclass(slots=True, eq=False)
class _Head:
    """A flow at one of its requests."""

    start: float
    requests: list[QueuedRequest]
    position: int = 0

    @property
    def request(self) -> QueuedRequest:
        return self.requests[self.position]

    def following(self) -> _Head | None:
        """The flow at its next request; None where this is the last one."""
        if self.position + 1 == len(self.requests):
            return None
        return _Head(self.start + self.request.cost, self.requests, self.position + 1)

    def __lt__(self, other: _Head) -> bool:
        return self._key() < other._key()

    def _key(self) -> tuple[float, float, int]:
        return self.start, self.request.generation.arrival, self.request.number


class _Charge(NamedTuple):
    """The cost at which a placed request was counted."""

    queue: _ModelQueue
    """Where that was: another one, of a later time, does not know of it."""
    key: str
    weight: float
    prompt: int
    """Tokens of its prompt."""
    cost: float
    """With that of its earlier attempts."""


class PlacementQueue:
    """Owns the waiting requests, one entry a request, and what placed ones were counted for. The caller keeps the
    bound."""

    def __init__(self) -> None:
        self._charges: RecentEntries[RequestId, _Charge] = RecentEntries(MAX_UNSETTLED)
        self._models: dict[ModelName, _ModelQueue] = {}
        self._by_request: dict[RequestId, QueuedRequest] = {}
        self._keys: Counter[str] = Counter()
        """How many requests of each key wait."""
        self._number = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._by_request.values())

    def __contains__(self, request: RequestId) -> bool:
        return request in self._by_request

    def models(self) -> list[ModelName]:
        """The models for which at least one request waits."""
        return list(self._models)

    def in_order(self, model: ModelName) -> Iterator[QueuedRequest]:
        """The requests that wait for `model`, in the order in which they are to be placed. The caller may take out
        those that it was given."""
        waiting = self._models.get(model)
        return waiting.in_order() if waiting is not None else iter(())

    def oldest(self, model: ModelName) -> QueuedRequest | None:
        """The one that has waited longest for `model`; None where none waits."""
        waiting = [queued for queued in self if queued.generation.model == model]
        return min(waiting, key=lambda queued: queued.since, default=None)

    def add(self, generation: Generation, now: float) -> QueuedRequest:
        """Puts a request in its place. It replaces an older attempt of the same request."""
        self.remove(generation.request)
        queued = QueuedRequest(generation, now, self._number)
        self._number += 1
        self._models.setdefault(generation.model, _ModelQueue()).add(queued)
        self._by_request[generation.request] = queued
        self._keys[generation.key] += 1
        return queued

    def get(self, request: RequestId) -> QueuedRequest | None:
        """The entry of `request`; None where it does not wait here."""
        return self._by_request.get(request)

    def remove(self, request: RequestId, *, placed: bool = False) -> QueuedRequest | None:
        """Takes `request` out and returns its entry; None if it did not wait here. `placed`: it counts for its key."""
        queued = self._by_request.pop(request, None)
        if queued is not None:
            model, key = queued.generation.model, queued.generation.key
            waiting = self._models[model]
            waiting.remove(queued, placed=placed)
            if placed and key:
                self._charge(waiting, queued)
            if not self._models[model].flows:
                del self._models[model]
            self._keys[key] -= 1
            if not self._keys[key]:
                del self._keys[key]
        return queued

    def _charge(self, waiting: _ModelQueue, queued: QueuedRequest) -> None:
        generation = queued.generation
        former = self._charges.get(generation.request)
        before = former.cost if former is not None and former.queue is waiting else 0.0
        self._charges[generation.request] = _Charge(
            waiting, generation.key, generation.weight, generation.prompt_length, before + queued.cost
        )

    def settle(self, request: RequestId, generated: int) -> None:
        """A request has ended with `generated` output tokens: its key is charged for these, not for all that it might
        have generated. Does nothing if it was not placed here, or was placed from an empty queue, which charges
        nobody."""
        charge = self._charges.pop(request, None)
        if charge is not None:
            charge.queue.settle(charge.key, charge.cost - max(1, charge.prompt + generated) / charge.weight)

    def surplus(self, newest: QueuedRequest) -> QueuedRequest:
        """The request to reject when the queue is too long: the last one of the key that has the most waiting relative
        to its weight; `newest` if that is of the same key. So whoever fills the queue does not keep others out of
        it."""
        own = newest.generation
        longest, most = own.key, self._keys[own.key] / own.weight
        for waiting in self._models.values():
            for key, flow in waiting.flows.items():
                length = self._keys[key] / flow.requests[-1].generation.weight
                if length > most:
                    longest, most = key, length
        if longest == own.key:
            return newest
        flows = [waiting.flows[longest] for waiting in self._models.values() if longest in waiting.flows]
        return max(flows, key=lambda flow: len(flow.requests)).requests[-1]

    def clear(self) -> list[Generation]:
        """Empties the queue, and returns the requests that it held, in order."""
        everyone = [queued.generation for waiting in self._models.values() for queued in waiting.in_order()]
        self._models.clear()
        self._by_request.clear()
        self._keys.clear()
        return everyone
