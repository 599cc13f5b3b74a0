"""Messages published a moment ago that may come back undelivered, kept as the bytes that were sent.

As objects they would be a million in a busy scheduler, which Python's garbage collector would look through.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any, NamedTuple

from shared.bus import Undelivered
from shared.bus.codec import decode
from shared.topics import Topic

MAX_MESSAGES = 8192
"""Messages whose "no responders" could still arrive; the oldest are forgotten first."""
MAX_BYTES = 32 * 2**20
"""All of them together: some seconds of the largest engine. "No responders" comes within milliseconds."""
KEEP_SECONDS = 10.0
"""A message is kept for this at least, and for twice as long at most: large ones would stay where no more are sent."""


class _SentMessage(NamedTuple):
    topic: Topic[Any]
    payload: bytes


class Unconfirmed:
    """Owns the tickets that replies come back with, and what was sent under each."""

    def __init__(self, limit: int = MAX_MESSAGES, limit_bytes: int = MAX_BYTES) -> None:
        self._limit, self._limit_bytes = limit, limit_bytes
        self._sent: OrderedDict[int, _SentMessage] = OrderedDict()
        self._bytes = 0
        self._tickets = itertools.count()
        self._seen = 0
        """Messages with lower tickets were there when old ones were forgotten last."""

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, topic: Topic[Any], payload: bytes) -> int:
        """The ticket to send along as the reply subject. The latest message is kept, however large."""
        ticket = next(self._tickets)
        self._sent[ticket] = _SentMessage(topic, payload)
        self._bytes += len(payload)
        while len(self._sent) > self._limit or (self._bytes > self._limit_bytes and len(self._sent) > 1):
            _, oldest = self._sent.popitem(last=False)
            self._bytes -= len(oldest.payload)
        return ticket

    def forget_old(self, *, away: bool = False) -> None:
        """Called every KEEP_SECONDS while there are any: forgets those that were there at the call before. While the
        server is `away` none of them may have reached it yet, so all are kept until the second call behind that."""
        while self._sent and (ticket := next(iter(self._sent))) < self._seen and not away:
            self._bytes -= len(self._sent.pop(ticket).payload)
        self._seen = 0 if away else next(self._tickets)

    def take(self, ticket: int) -> Undelivered | None:
        """The message that was sent under this ticket, once; None where it is forgotten."""
        sent = self._sent.pop(ticket, None)
        if sent is None:
            return None
        self._bytes -= len(sent.payload)
        return Undelivered(sent.topic, decode(sent.payload, sent.topic.type))
