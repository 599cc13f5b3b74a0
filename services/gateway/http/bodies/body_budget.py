"""How many bytes the bodies of all calls hold together, and those of one key."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

from services.gateway.api.errors import RequestError
from services.gateway.core.api_keys import ANONYMOUS, KeyName
from services.gateway.metrics import BODY_BYTES
from shared.machine.heap import give_back_freed_memory

READ_BYTES = 256 * 2**10
"""Bytes that a connection may take in before its endpoint asks for more; as many are leased before each read."""
SMALL_BODY = 64 * 2**10
"""Bodies up to this size may use the whole budget, larger ones `LARGE_SHARE` of it: requests of a usual size are read
while large ones wait."""
LARGE_SHARE = 0.75
KEY_SHARE = 0.75
"""Of either, what the bodies of one API key may take, and of the bodies that wait: others' are read while it sends
slowly. Clients without a key are not told apart."""
MEMORY_BODY = 2**20
"""Bytes of a body that leaves so much freed memory behind that it is given back to the system: it is there several
times, and what is small and lives on lies between."""
GIVE_BACK_AGAIN = 25
"""Seconds: the bus keeps what may come back undelivered for 20."""
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
        self._held: Counter[KeyName] = Counter()
        """Bytes by key, without those of calls that have none."""
        self._grown = False
        """Whether a body of MEMORY_BODY bytes or more has ended since memory was given back."""
        self._until_again = 0
        """Calls of `give_back_memory` until it is given back once more; 0: it is not."""

    async def take(self, lease: BodyLease, size: int) -> None:
        """Raises what `lease` holds to `size` bytes. Raises RequestError 503 where there is no room in time."""
        if size <= lease.held:
            return
        # A large body waits behind all others, a small one behind small ones.
        before = any(
            (size > SMALL_BODY or waiter.size <= SMALL_BODY) and not self._is_too_much(waiter.lease, waiter.size)
            for waiter in self._waiting
        )
        all_wait = self._all_wait_with(lease, size)
        if (not before or all_wait) and self._grant(lease, size):
            return
        if all_wait or not self._may_wait(lease):
            raise self._refusal(lease, size)
        waiter = _Waiter(lease, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(self._patience):
                await waiter.granted
        except TimeoutError:
            if not lease.closed and lease.held >= size:
                return  # granted in the moment in which the time ended
            raise self._refusal(lease, size) from None
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def give_back(self, lease: BodyLease, size: int) -> None:
        """Lowers what `lease` holds to `size` bytes, and lets waiting bodies go on."""
        self._grown = self._grown or lease.held >= MEMORY_BODY
        self._change(lease, size)
        large_waits = False
        for waiter in list(self._waiting):  # in order; behind a large one that does not fit yet, small ones only
            if waiter.granted.done() or (large_waits and waiter.size > SMALL_BODY):
                continue
            if self._is_too_much(waiter.lease, waiter.size):
                continue
            if self._grant(waiter.lease, waiter.size):
                self._waiting.remove(waiter)
                waiter.granted.set_result(None)
            elif waiter.size > SMALL_BODY:
                large_waits = True
            else:
                return

    def give_back_memory(self) -> None:
        """Called every second: what large bodies took goes back to the system once none of them is there; and once
        more when the bus has forgotten their messages, too."""
        if self._grown and self.used < MEMORY_BODY:
            self._grown, self._until_again = False, GIVE_BACK_AGAIN
            give_back_freed_memory()
        elif self._until_again:
            self._until_again -= 1
            if not self._until_again:
                give_back_freed_memory()

    def _all_wait_with(self, lease: BodyLease, size: int) -> bool:
        """Whether nobody would go on who holds anything, of all or of those of its key where these are too much, were
        this one to wait with what it holds."""
        if not lease.held:
            return False
        waiting = [waiter.lease for waiter in self._waiting]
        if lease.held + sum(each.held for each in waiting) >= self.used:
            return True
        of_key = sum(each.held for each in waiting if each.key == lease.key)
        return self._is_too_much(lease, size) and lease.held + of_key >= self._held[lease.key]

    def _may_wait(self, lease: BodyLease) -> bool:
        """Whether there is room among those that wait, for one of its key."""
        of_key = 0 if lease.key == ANONYMOUS.name else sum(each.lease.key == lease.key for each in self._waiting)
        return len(self._waiting) < MAX_WAITING and of_key < int(MAX_WAITING * KEY_SHARE)

    def _is_too_much(self, lease: BodyLease, size: int) -> bool:
        """Whether `size` bytes of it are more than its key may have beside its others."""
        others = 0 if lease.key == ANONYMOUS.name else self._held[lease.key] - lease.held
        return others > 0 and others + size > int(self._most(size) * KEY_SHARE)

    def _most(self, size: int) -> int:
        """Bytes that may be in use behind a body of this size."""
        return self.limit if size <= SMALL_BODY else int(self.limit * LARGE_SHARE)

    def _grant(self, lease: BodyLease, size: int) -> bool:
        """Raises what `lease` holds to `size` bytes where there is room."""
        if self.used - lease.held + size > self._most(size) or self._is_too_much(lease, size):
            return False
        self._change(lease, size)
        return True

    def _change(self, lease: BodyLease, size: int) -> None:
        if lease.key != ANONYMOUS.name:
            self._held[lease.key] += size - lease.held
            if not self._held[lease.key]:
                del self._held[lease.key]
        self.used += size - lease.held
        lease.held = size
        BODY_BYTES.set(self.used)

    def _refusal(self, lease: BodyLease, size: int) -> RequestError:
        if self._is_too_much(lease, size):
            most = int(self._most(size) * KEY_SHARE)
            text = f"open requests of this API key hold {self._held[lease.key]} bytes of bodies of the {most} for one"
        else:
            text = f"open requests hold {self.used} bytes of bodies of the {self.limit} that are allowed"
        return RequestError(503, f"{text}; try again", retry_after=RETRY_AFTER)


@dataclass(slots=True, eq=False)
class BodyLease:
    """What one request's body holds of the budget."""

    held: int = 0
    """Bytes; only the budget changes them."""
    key: KeyName = ANONYMOUS.name
    """Whose it is; it does not change while anything is held."""
    closed: bool = False
    """Whether its request has ended."""


class _Waiter(NamedTuple):
    lease: BodyLease
    size: int
    granted: asyncio.Future[None]


class BodyLimits(NamedTuple):
    """Limits of reading a request's body."""

    max_bytes: int
    max_media_bytes: int
    """Of a body that may have images, videos or sounds in it."""
    timeout: float
    """Seconds that a client may take to send it, time that it waits for room not included."""
    stall_timeout: float
    """Seconds that may pass without any byte."""
    budget: BodyBudget
    media: bool = False
    """Whether it may have any of these."""

    @property
    def most(self) -> int:
        """Bytes that it may have."""
        return self.max_media_bytes if self.media else self.max_bytes

    def leased(self, size: int, length: int | None) -> int:
        """Bytes that a body leases before more is read of it than `size`: as many as that may be; all that it may still
        have once it is larger than bodies are without media, so that several which have come far do not wait for each
        other. `length`: as it was declared."""
        end = self.most if length is None else length
        wanted = min(size + READ_BYTES, end)
        return end if wanted > self.max_bytes else wanted
