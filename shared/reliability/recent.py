"""Bounded memories: a map of the newest entries, and which attempts of the last requests are over."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from shared.ids import Attempt, RequestId

K = TypeVar("K")
V = TypeVar("V")


class RecentEntries(OrderedDict[K, V]):
    """A map that keeps its newest `limit` entries, in the order in which each key was set last."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        """Makes `key` the newest. The oldest entry is forgotten where there would be more than `limit`."""
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.limit:
            self.popitem(last=False)


class AttemptFence:
    """Owns the newest accepted and the newest closed attempt of the last `limit` requests, so that stale messages,
    which carry an older attempt number, start nothing. Attempts count from 1."""

    def __init__(self, limit: int) -> None:
        self._attempts: RecentEntries[RequestId, tuple[int, int]] = RecentEntries(limit)

    def accept(self, request: RequestId, attempt: Attempt) -> bool:
        """Makes `attempt` the current one. False, and no change, where it is closed, accepted before, or older than one
        that was accepted."""
        accepted, closed = self._attempts.get(request, (0, 0))
        is_new = attempt > max(accepted, closed)
        self._attempts[request] = (attempt if is_new else accepted, closed)
        return is_new

    def close(self, request: RequestId, attempt: Attempt) -> None:
        """Attempts up to this one are over: finished, failed, cancelled or withdrawn."""
        accepted, closed = self._attempts.get(request, (0, 0))
        self._attempts[request] = (accepted, max(attempt, closed))

    def is_closed(self, request: RequestId, attempt: Attempt) -> bool:
        """Whether `attempt` is over; False for a request that is not remembered."""
        known = self._attempts.get(request)
        return known is not None and attempt <= known[1]

    def is_current(self, request: RequestId, attempt: Attempt) -> bool:
        """Whether no newer attempt was accepted and this one is not closed; True for a request not remembered."""
        known = self._attempts.get(request)
        return known is None or (attempt >= known[0] and attempt > known[1])

    def readmit(self, request: RequestId) -> None:
        """Forgets that an attempt was accepted: it leaves for another process, and may be given back."""
        self._attempts[request] = (0, self._attempts.get(request, (0, 0))[1])
