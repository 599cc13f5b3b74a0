"""The interface of the message bus: typed topics, typed messages and named errors.

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
    """The base class of all bus errors: an operation on the bus failed."""


class PayloadTooLarge(BusError):
    """The encoded message is larger than the server takes (`max_payload`). Nothing was sent."""

    def __init__(self, subject: str, size: int, limit: int) -> None:
        super().__init__(f"{subject}: message of {size} bytes, the bus takes {limit} at most")
        self.size, self.limit = size, limit


class NoResponders(BusError):
    """The subject of a request has no subscriber."""


class ReplyTimeout(BusError):
    """The request was delivered, but no reply came in time."""


class ReplyError(BusError):
    """The responder could not decode the request, or its reply could not be decoded."""


class ReplyTooLarge(ReplyError):
    """The reply is larger than the server takes (`max_payload`), and was not sent."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the answer has {size} bytes, the bus takes {limit} at most")


@dataclass(frozen=True, slots=True)
class Undelivered:
    """A message published with `confirm=True` that had no subscriber. Handed to the `on_undelivered` callback."""

    topic: Topic[Any]
    message: Any


Handler = Callable[[M], Awaitable[None]]
Offer = Callable[[M], bool]
"""Takes a message at once, or refuses it."""
Responder = Callable[[M], Awaitable[Any]]
Tap = Callable[[str, bytes], Awaitable[None]]
"""Handler of a tap: receives the subject (below the namespace) and the payload of each message."""
UndeliveredHandler = Callable[[Undelivered], Awaitable[None]]
Endpoint = Callable[[bytes], Awaitable[bytes]]
"""One endpoint of a micro service: request body in, response body out. Raises EndpointError to refuse."""


class EndpointError(Exception):
    """An endpoint's refusal: `code` as in HTTP, and a text for the caller."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


class Subscription(Protocol):
    """A running subscription, as returned by `subscribe`, `serve` and `tap`."""

    async def stop(self) -> None:
        """Takes no more messages; those already received are still handed over."""


class Bus(Protocol):
    """One connection to the bus. A method that names exceptions raises no other bus error."""

    @property
    def connected(self) -> bool:
        """Whether messages published now are sent at once rather than buffered."""

    @property
    def max_payload(self) -> int:
        """The largest message in bytes, the server's limit, read at connect."""

    def liveness_now(self) -> float:
        """Seconds on a clock that is paused while the bus is unreachable, and for a moment after it is back.

        Time-outs that judge whether others are alive are counted on it.
        """

    def outage(self) -> float:
        """Seconds for which the bus has been unreachable, by the clock of the wall; 0.0 while it is there."""

    async def publish(self, topic: Topic[M], message: M, *, confirm: bool = False) -> None:
        """Sends `message` to the topic's subscribers. With `confirm`, having none is reported at once.

        Raises PayloadTooLarge. While the bus is away messages are buffered up to a bound, then dropped.
        """

    async def subscribe(self, topic: Topic[M], handler: Handler[M], *, offer: Offer[M] | None = None) -> Subscription:
        """Calls `handler` for each message, one at a time. Undecodable ones are counted, logged and skipped.

        With `offer`, a message that nothing is ahead of may be given to that instead, which spares a task's turn; what
        it refuses `handler` gets.
        """

    async def serve(self, topic: Topic[M], responder: Responder[M]) -> Subscription:
        """Like `subscribe`, for requests: what `responder` returns is sent back as the reply.

        Requests begin in the order of their arrival, and several are answered at a time: one that waits does not hold
        up the next (bounds: `shared.bus.concurrent_requests`).
        """

    async def tap(self, pattern: str, handler: Tap) -> Subscription:
        """For recording: calls `handler` with subject and bytes of every message whose subject matches.

        `pattern` is relative to the namespace; `*` matches one token, and `>` at its end matches all that follow. It
        counts as a subscriber: while it is there, messages without any other subscriber do not come back.
        """

    async def request(self, topic: Topic[M], message: M, reply_type: Any, timeout: float) -> Any:
        """Sends a request and returns the reply, decoded as `reply_type`. Raises NoResponders, ReplyTimeout,
        ReplyError, ReplyTooLarge, PayloadTooLarge."""

    def on_undelivered(self, handler: UndeliveredHandler) -> None:
        """Sets the handler of confirmed messages that had no subscriber. There is one handler; without it they are
        logged."""

    async def serve_micro(self, name: str, version: str, description: str, endpoints: Mapping[str, Endpoint]) -> None:
        """Offers `endpoints` (subject below the namespace → function) as a NATS micro service."""

    async def request_raw(self, subject: str, body: bytes, timeout: float) -> bytes:
        """Calls an endpoint of a micro service and returns its response. Raises NoResponders, ReplyTimeout,
        EndpointError."""

    async def flush(self) -> None:
        """Returns once everything published has reached the server. Raises ReplyTimeout after 2 s."""

    async def close(self) -> None:
        """Ends the connection; what was published before is sent if the server is there."""
