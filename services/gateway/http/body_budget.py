"""How much memory the bodies of all open requests may take together. No sockets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from services.gateway.api.errors import RequestError
from services.gateway.metrics import BODY_BYTES

SMALL_BODY = 64 * 2**10
"""Bodies up to this size may use the whole budget, larger ones `LARGE_SHARE` of it: requests of a usual size are read
while large ones wait."""
LARGE_SHARE = 0.75
MAX_WAITING = 256
"""Bodies that wait for room. Each may hold what one read of its socket took in; further ones are refused at once."""
RETRY_AFTER = 1.0
"""Seconds that a refused client is told to wait."""


class BodyBudget:
    """Owns the number of bytes that bodies hold, over all connections.

    A body takes as many bytes as it is about to read, and gives them back when its request has ended, as a request
    keeps its prompt for further attempts. Where there is no room it waits, in order of arrival, for `patience` seconds
    at most. Then it is refused with 503 and not with 429: the client did nothing too often, and load balancers try
    another gateway after a 503.
    """

    def __init__(self, limit: int, patience: float) -> None:
        """`limit` in bytes, `patience` in seconds."""
        self.limit, self._patience = limit, patience
        self.used = 0
        self._waiting: deque[_Waiter] = deque()

    def lease(self) -> BodyLease:
        """Returns the lease of a new body, which holds nothing yet."""
        return BodyLease(self)

    async def take(self, lease: BodyLease, size: int) -> None:
        """Raises what `lease` holds to `size` bytes. Raises RequestError 503 where there is no room in time."""
        if size <= lease.held:
            return
        if self._fits(lease, size) and not any(self._before(waiter, size) for waiter in self._waiting):
            self._grant(lease, size)
            return
        if len(self._waiting) >= MAX_WAITING:
            raise self._refusal()
        waiter = _Waiter(lease, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(self._patience):
                await waiter.granted
        except TimeoutError:
            if not lease.closed and lease.held >= size:
                return  # granted in the moment in which the time ended
            raise self._refusal() from None
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def give_back(self, lease: BodyLease, size: int) -> None:
        """Lowers what `lease` holds to `size` bytes, and lets waiting bodies go on."""
        self.used -= lease.held - size
        lease.held = size
        BODY_BYTES.set(self.used)
        for waiter in list(self._grantable()):
            self._waiting.remove(waiter)
            waiter.granted.set_result(None)

    def _grantable(self) -> Iterator[_Waiter]:
        """Grants and yields waiting bodies in order; behind a large one that does not fit yet, small ones only."""
        large_waits = False
        for waiter in self._waiting:
            if waiter.granted.done() or (large_waits and waiter.size > SMALL_BODY):
                continue
            if self._fits(waiter.lease, waiter.size):
                self._grant(waiter.lease, waiter.size)
                yield waiter
            elif waiter.size > SMALL_BODY:
                large_waits = True
            else:
                return

    def _fits(self, lease: BodyLease, size: int) -> bool:
        limit = self.limit if size <= SMALL_BODY else int(self.limit * LARGE_SHARE)
        return self.used - lease.held + size <= limit

    @staticmethod
    def _before(waiter: _Waiter, size: int) -> bool:
        """Whether a new body of that size has to wait behind `waiter`."""
        return size > SMALL_BODY or waiter.size <= SMALL_BODY

    def _grant(self, lease: BodyLease, size: int) -> None:
        self.used += size - lease.held
        lease.held = size
        BODY_BYTES.set(self.used)

    def _refusal(self) -> RequestError:
        text = f"open requests hold {self.used} bytes of bodies of the {self.limit} that are allowed; try again"
        return RequestError(503, text, retry_after=RETRY_AFTER)


class BodyLease:
    """Owns the bytes that one request's body holds of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.held = 0
        self.closed = False

    async def take(self, size: int) -> None:
        """Holds at least `size` bytes. Raises RequestError 503 where there is no room in time."""
        await self._budget.take(self, size)

    def shrink(self, size: int) -> None:
        """Holds `size` bytes of those that it has taken."""
        self._budget.give_back(self, min(size, self.held))

    def close(self) -> None:
        """Gives everything back: the request has ended."""
        self.closed = True
        self.shrink(0)


class _Waiter(NamedTuple):
    lease: BodyLease
    size: int
    granted: asyncio.Future[None]
