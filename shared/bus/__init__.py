"""The bus as everybody sees it: typed topics in, typed messages out, errors with names.

Delivery is at most once. Two implementations keep this interface: `nats_bus` and, for tests and one-process
use, `memory_bus`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from shared.topics import Topic

M = TypeVar("M")


class BusError(Exception):
    """Something the bus could not do."""


class PayloadTooLarge(BusError):
    """The encoded message is larger than the server takes (`max_payload`). Nothing was sent."""

    def __init__(self, subject: str, size: int, limit: int) -> None:
        super().__init__(f"{subject}: message of {size} bytes, the bus takes {limit} at most")
        self.size, self.limit = size, limit


class NoResponders(BusError):
    """Nobody subscribes to the subject of a question."""


class AnswerTimeout(BusError):
    """The question was delivered, but not answered in time."""


class AnswerError(BusError):
    """Whoever was asked could not decode the question, or answered something undecodable."""


@dataclass(frozen=True, slots=True)
class Undelivered:
    """A message published with `confirm=True` that had no subscriber. Handed to the `on_undelivered` callback."""

    topic: Topic[Any]
    message: Any


Handler = Callable[[M], Awaitable[None]]
Answerer = Callable[[M], Awaitable[Any]]
Tap = Callable[[str, bytes], Awaitable[None]]
"""Gets the subject below the namespace, and the payload."""
UndeliveredHandler = Callable[[Undelivered], Awaitable[None]]
Endpoint = Callable[[bytes], Awaitable[bytes]]
"""One endpoint of a micro service: request body in, response body out. Raises EndpointError to refuse."""


class EndpointError(Exception):
    """An endpoint's refusal: `code` as in HTTP, and a text for the caller."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


class Subscription(Protocol):
    async def stop(self) -> None:
        """Takes no more messages; those already received are still handed over."""


class Bus(Protocol):
    @property
    def connected(self) -> bool: ...

    @property
    def max_payload(self) -> int:
        """Bytes; the server's limit, read at connect."""

    def liveness_now(self) -> float:
        """Seconds on a clock that stands still while the bus is away, and for a moment after it is back.

        Time-outs that judge whether others are alive are counted on it.
        """

    async def publish(self, topic: Topic[M], message: M, *, confirm: bool = False) -> None:
        """Sends `message` to the topic's subscribers. With `confirm`, having none is reported at once.

        Raises PayloadTooLarge. While the bus is away messages are buffered up to a bound, then dropped.
        """

    async def subscribe(self, topic: Topic[M], handler: Handler[M]) -> Subscription:
        """Calls `handler` for each message, one at a time. Undecodable ones are counted, logged and skipped."""

    async def answer(self, topic: Topic[M], answerer: Answerer[M]) -> Subscription:
        """Like `subscribe`, for questions: what `answerer` returns is sent back."""

    async def tap(self, pattern: str, handler: Tap) -> Subscription:
        """For recording: calls `handler` with subject and bytes of every message whose subject matches.

        `pattern` stands below the namespace; `*` is one token, `>` at its end all that follow. It counts as a
        subscriber: while it is there, messages that nobody else hears do not come back.
        """

    async def ask(self, topic: Topic[M], question: M, answer_type: Any, timeout: float) -> Any:
        """The answer, decoded as `answer_type`. Raises NoResponders, AnswerTimeout, AnswerError, PayloadTooLarge."""

    def on_undelivered(self, handler: UndeliveredHandler) -> None:
        """Where undelivered confirmed messages go. One handler; without one they are logged."""

    async def serve_micro(self, name: str, version: str, description: str, endpoints: Mapping[str, Endpoint]) -> None:
        """Offers `endpoints` (subject below the namespace → function) as a NATS micro service."""

    async def ask_raw(self, subject: str, body: bytes, timeout: float) -> bytes:
        """Asks a micro service's endpoint. Raises NoResponders, AnswerTimeout, EndpointError."""

    async def flush(self) -> None:
        """Returns once everything published has reached the server. Raises AnswerTimeout after 2 s."""

    async def close(self) -> None: ...
