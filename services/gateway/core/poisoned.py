"""Requests and grammars of which processes died: what is equal in all of them, and for how long they are refused."""

from __future__ import annotations

from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from shared.ids import Attempt, GatewayId, RequestId
from shared.messages.gateway import RequestRejected
from shared.messages.generation import Grammar
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
        trace=None,
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
    """Owns the marks of the last `limit` requests and grammars that processes died of. A request is refused for
    `seconds`, a grammar for `grammar_seconds`."""

    def __init__(self, limit: int, seconds: float, grammar_seconds: float) -> None:
        self._seconds, self._grammar_seconds = seconds, grammar_seconds
        self.until: RecentEntries[bytes, float] = RecentEntries(limit)
        """By the fingerprint of a request, or the key of a grammar. As long as it is empty nothing is refused."""

    def add(self, tokenize: Tokenize, now: float) -> None:
        """Refuses equal requests from now on."""
        self.until[fingerprint(tokenize)] = now + self._seconds

    def add_grammar(self, grammar: Grammar, now: float) -> None:
        """Refuses requests with this grammar from now on."""
        self.until[grammar.key] = now + self._grammar_seconds

    def refuses(self, tokenize: Tokenize, now: float) -> bool:
        """Whether an equal request was given up a short while ago."""
        return self._holds(fingerprint(tokenize), now)

    def refusal(self, tokenize: Tokenize, now: float) -> RequestRejected | None:
        """The answer to a request that is refused at once, as is or for its grammar; None where it is not."""
        if tokenize.grammar is not None and self._holds(tokenize.grammar.key, now):
            return self.grammar_rejection(tokenize)
        return rejection(tokenize) if self.refuses(tokenize, now) else None

    def grammar_rejection(self, tokenize: Tokenize) -> RequestRejected:
        """The final answer to a request whose grammar's processes died."""
        return RequestRejected(
            request=tokenize.request,
            attempt=tokenize.attempt,
            kind="poisoned",
            message="the process that compiles and follows it was killed, or did not answer, again and again; the"
            f" grammar is refused for {self._grammar_seconds:g} s",
            field="grammar",
        )

    def _holds(self, mark: bytes, now: float) -> bool:
        until = self.until.get(mark)
        if until is not None and now >= until:
            del self.until[mark]
            return False
        return until is not None
