"""How much memory the bodies of all open requests may take together. No sockets."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
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

    async def take(self, lease: BodyLease, size: int) -> None:
        """Raises what `lease` holds to `size` bytes. Raises RequestError 503 where there is no room in time."""
        if size <= lease.held:
            return
        # A large body waits behind all others, a small one behind small ones.
        before = any(size > SMALL_BODY or waiter.size <= SMALL_BODY for waiter in self._waiting)
        if not before and self._grant(lease, size):
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
        large_waits = False
        for waiter in list(self._waiting):  # in order; behind a large one that does not fit yet, small ones only
            if waiter.granted.done() or (large_waits and waiter.size > SMALL_BODY):
                continue
            if self._grant(waiter.lease, waiter.size):
                self._waiting.remove(waiter)
                waiter.granted.set_result(None)
            elif waiter.size > SMALL_BODY:
                large_waits = True
            else:
                return

    def _grant(self, lease: BodyLease, size: int) -> bool:
        """Raises what `lease` holds to `size` bytes where there is room."""
        used = self.used - lease.held + size
        if used > (self.limit if size <= SMALL_BODY else int(self.limit * LARGE_SHARE)):
            return False
        lease.held, self.used = size, used
        BODY_BYTES.set(used)
        return True

    def _refusal(self) -> RequestError:
        text = f"open requests hold {self.used} bytes of bodies of the {self.limit} that are allowed; try again"
        return RequestError(503, text, retry_after=RETRY_AFTER)


@dataclass(slots=True, eq=False)
class BodyLease:
    """What one request's body holds of the budget."""

    held: int = 0
    """Bytes; only the budget changes them."""
    closed: bool = False
    """Whether its request has ended."""


class _Waiter(NamedTuple):
    lease: BodyLease
    size: int
    granted: asyncio.Future[None]
