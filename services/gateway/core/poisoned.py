"""Requests of which processes died: what is equal in all of them, and for how long they are refused."""

from __future__ import annotations

from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from shared.ids import Attempt, GatewayId, RequestId
from shared.messages.gateway import RequestRejected
from shared.messages.tokenizer import Tokenize
from shared.reliability.recent import RecentEntries

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def fingerprint(tokenize: Tokenize) -> bytes:
    """BLAKE2b-128 of what is computed: equal for requests that differ in their ids, seed, time or place in a queue."""
    same = replace(
        tokenize,
        request=RequestId(""),
        attempt=Attempt(1),
        gateway=GatewayId(""),
        sampling=replace(tokenize.sampling, seed=0),
        resume=b"",
        sent_chars=0,
        priority=0,
        arrival=0.0,
        cache_salt=None,
        avoid=(),
        suspect_until=None,
        key="",
        weight=1.0,
    )
    return blake2b(_encode(same), digest_size=16).digest()


def rejection(tokenize: Tokenize) -> RequestRejected:
    """The final answer to a request that processes died of."""
    return RequestRejected(
        request=tokenize.request,
        attempt=tokenize.attempt,
        kind="poisoned",
        message="this request ended the processes that handled it, alone at last; it is not tried again",
    )


class PoisonedRequests:
    """Owns the fingerprints of the last `limit` requests that processes died of. Each is refused for `seconds`."""

    def __init__(self, limit: int, seconds: float) -> None:
        self._seconds = seconds
        self._until: RecentEntries[bytes, float] = RecentEntries(limit)

    def __bool__(self) -> bool:
        return bool(self._until)

    def add(self, tokenize: Tokenize, now: float) -> None:
        """Refuses equal requests from now on."""
        self._until[fingerprint(tokenize)] = now + self._seconds

    def refuses(self, tokenize: Tokenize, now: float) -> bool:
        """Whether an equal request was given up a short while ago."""
        mark = fingerprint(tokenize)
        until = self._until.get(mark)
        if until is not None and now >= until:
            del self._until[mark]
            return False
        return until is not None
