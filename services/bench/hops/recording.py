"""What passes on the stack's bus, with the time at which it passed: the one clock of all hops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from services.bench.errors import BenchError
from shared import topics
from shared.bus import Bus
from shared.bus.codec import decode
from shared.ids import DetokenizerId, EngineId, GatewayId, ModelName
from shared.topics import Topic

MAX_BYTES = 2 * 2**30
"""Of all that is recorded at a time."""
BusHop = Literal["tokenize", "route", "generate", "plan", "result", "tokens", "deltas"]
"""A kind of message between a request and its tokens."""
_ID = "any"
TOPICS: dict[BusHop, Topic[Any]] = {
    "tokenize": topics.tokenize(ModelName(_ID)),
    "route": topics.route(),
    "generate": topics.engine_requests(EngineId(_ID)),
    "plan": topics.engine_steps(EngineId(_ID)),
    "result": topics.engine_results(EngineId(_ID)),
    "tokens": topics.detokenizer_tokens(DetokenizerId(_ID)),
    "deltas": topics.gateway_inbox(GatewayId(_ID)),
}


class PassedMessage(NamedTuple):
    """One message, and when it passed."""

    at: float
    """In seconds of `time.perf_counter`."""
    size: int
    """Bytes of the payload."""
    subject: str
    message: Any


def _kind(subject: str) -> tuple[str, str]:
    """A subject without the id in it."""
    first, *rest = subject.split(".")
    return first, rest[1] if len(rest) == 2 else ""


_KINDS: dict[tuple[str, str], BusHop] = {_kind(topic.subject): hop for hop, topic in TOPICS.items()}


def hop_of(subject: str) -> BusHop | None:
    """Of which hop a subject below the namespace is; None of another kind of message."""
    return _KINDS.get(_kind(subject))


class BusRecording:
    """Owns the messages that passed since `clear`. They are only kept meanwhile, and decoded when they are asked for.

    The server sends each of them here, too, which it would not do without the measurement.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: in seconds; that of the clients whose times are compared with the messages'."""
        self._clock = clock
        self._passed: list[tuple[float, str, bytes]] = []
        self._bytes = 0
        self._stopped = True

    async def listen(self, bus: Bus) -> None:
        """Begins to hear the bus: all of it by one subscription, so that the order is that in which messages pass."""
        await bus.tap(">", self._record)
        await bus.flush()

    async def _record(self, subject: str, payload: bytes) -> None:
        now = self._clock()
        if not self._stopped and hop_of(subject) is not None:
            self._passed.append((now, subject, payload))
            self._bytes += len(payload)
            self._stopped = self._bytes > MAX_BYTES

    def begin(self) -> None:
        """Forgets what was recorded, and records from now on."""
        self._passed, self._bytes, self._stopped = [], 0, False

    def end(self) -> None:
        """Records no more until `begin`. Raises BenchError where more passed than is kept."""
        if self._bytes > MAX_BYTES:
            raise BenchError(f"more than {MAX_BYTES} bytes passed: measure for fewer --seconds")
        self._stopped = True

    def messages(self, hop: BusHop) -> Iterator[PassedMessage]:
        """Those of one kind, in the order in which they passed."""
        for at, subject, payload in self._passed:
            if hop_of(subject) == hop:
                yield PassedMessage(at, len(payload), subject, decode(payload, TOPICS[hop].type))
