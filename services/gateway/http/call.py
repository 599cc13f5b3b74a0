"""One HTTP call: its headers, its body within what all bodies may take together, its connection, and a plain
response."""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from services.gateway.api.errors import RequestError
from services.gateway.api.response import ResponseOutcome
from services.gateway.core.api_keys import ANONYMOUS
from services.gateway.metrics import BODY_BYTES, ERRORS
from shared.ids import ModelName
from shared.machine.heap import give_back_freed_memory
from shared.telemetry.logs import record_trace
from shared.telemetry.tracing import RequestSpan

R = TypeVar("R")

EXTENSION = "baton.connection"
"""Key in the ASGI scope's extensions under which the connection is found."""
KEY_EXTENSION = "baton.key"
"""Key under which a call of this process itself says whose it is. What comes over HTTP has no such extension."""
JSON = b"application/json"
READ_BYTES = 256 * 2**10
"""Bytes that a connection may take in before its endpoint asks for more; as many are leased before each read."""
MIN_RATE = 64 * 2**10
"""Bytes per second at which a body that is read piece by piece must arrive, and an answer that is held be read, behind
the first `timeout` seconds."""
SMALL_BODY = 64 * 2**10
"""Bodies up to this size may use the whole budget, larger ones `LARGE_SHARE` of it: requests of a usual size are read
while large ones wait."""
LARGE_SHARE = 0.75
MEMORY_BODY = 2**20
"""Bytes of a body that leaves so much freed memory behind that it is given back to the system: it is there several
times, and what is small and lives on lies between."""
GIVE_BACK_AGAIN = 25
"""Seconds: the bus keeps what may come back undelivered for 20."""
MAX_WAITING = 256
"""Bodies that wait for room. Each may hold what one read of its socket took in; further ones are refused at once."""
SECOND_LOOK = 0.1
"""Seconds for what came while the gateway itself got no time."""
RETRY_AFTER = 1.0
"""Seconds that a refused client is told to wait."""
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
LINGER_SECONDS = 5.0
LINGER_BYTES = 256 * 2**20
"""How long, and how much of, a refused body is still read."""
PARAM_SHOWN = 100
"""A field that nobody knows has the name that the client gave it."""

Headers = Iterable[tuple[bytes, bytes]]


class ApiShape(NamedTuple):
    """What clients of an API expect beside an answer's body."""

    error_body: Callable[[RequestError, str], bytes]
    """How errors are shown, of a call with an id."""
    id_headers: tuple[bytes, ...] = (b"x-request-id",)
    """The headers that name the request."""
    for_anthropic: ApiShape | None = None
    """Another one for Anthropic's clients, where they have the path in common with others."""


OPENAI = ApiShape(lambda error, _: error.body())


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
        self._grown = False
        """Whether a body of MEMORY_BODY bytes or more has ended since memory was given back."""
        self._until_again = 0
        """Calls of `give_back_memory` until it is given back once more; 0: it is not."""

    async def take(self, lease: BodyLease, size: int) -> None:
        """Raises what `lease` holds to `size` bytes. Raises RequestError 503 where there is no room in time."""
        if size <= lease.held:
            return
        # A large body waits behind all others, a small one behind small ones.
        before = any(size > SMALL_BODY or waiter.size <= SMALL_BODY for waiter in self._waiting)
        if (not before or self._all_wait_with(lease)) and self._grant(lease, size):
            return
        if len(self._waiting) >= MAX_WAITING or self._all_wait_with(lease):
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
        self._grown = self._grown or lease.held >= MEMORY_BODY
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

    def _all_wait_with(self, lease: BodyLease) -> bool:
        """Whether nobody would go on who holds anything, were this one to wait with what it holds."""
        return lease.held > 0 and lease.held + sum(waiter.lease.held for waiter in self._waiting) >= self.used

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


@dataclass(slots=True)
class CallRecord:
    """What a call's audit line says; whoever learns something of it fills it in."""

    status: int | None = None
    """Of the response; None where none was started."""
    outcome: ResponseOutcome | None = None
    """Of a generation; None for everything else."""
    param: str | None = None
    """The field for which it was refused, its first `PARAM_SHOWN` characters; None: it was not, or for none."""
    code: str | None = None
    """Of the error, where it has one."""
    request: str | None = None
    """The generation's id, which the other lines of the logs have."""
    model: ModelName | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0


class ClientConnection(Protocol):
    """What an endpoint needs of the client's connection."""

    on_lost: Callable[[], None] | None
    """Called once when the client leaves."""

    def is_closing(self) -> bool:
        """Returns whether the client has left."""

    def write_chunk(self, data: bytes) -> None:
        """Writes a part of a streamed response; several may go to the client as one."""

    def flush(self) -> None:
        """Hands on what was written, before anything else is sent."""

    def unread(self) -> int:
        """Returns the bytes that the client has left unread."""

    def abort(self) -> None:
        """Closes the connection at once."""


class Call:
    """Owns one request and its response, as ASGI passes them between uvicorn and an endpoint."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, limits: BodyLimits, shape: ApiShape = OPENAI
    ) -> None:
        self.scope, self._receive, self.send = scope, receive, send
        self.limits = limits
        self._lease = BodyLease()
        self.connection: ClientConnection = scope["extensions"][EXTENSION]
        self.key = ANONYMOUS
        """Whose request it is, once that has been found out."""
        self.record = CallRecord()
        self.reserved: int | None = None
        """Tokens set aside for it, of its key's tokens per minute; None: it does not count as open for its key."""
        self.sequences = 0
        """Sequences that count as open for its key."""
        self.limit_headers: list[tuple[bytes, bytes]] = []
        """What is left of its key's limits, for the response."""
        self.asked_elsewhere = KEY_EXTENSION in scope["extensions"]
        """Whether the overflow provider was considered for it, which happens once, and not for calls of this process
        itself."""
        self._body_read = False
        """Whether the body has been read to its end."""
        self._body: bytes | None = None
        self._released = False
        self._answer_held = False
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        """By their lower-case names."""
        self.is_anthropic = b"anthropic-version" in self.headers
        self._shape = shape.for_anthropic if self.is_anthropic and shape.for_anthropic is not None else shape
        given = self.headers.get(b"x-request-id", b"")
        self.client_id = given.decode() if _REQUEST_ID.fullmatch(given) else None
        self.id = self.client_id or secrets.token_hex(16)
        self.span: RequestSpan | None = None
        """Of its trace; None: it is not traced."""

    @property
    def trace(self) -> str | None:
        """The context that its requests carry."""
        return None if self.span is None else self.span.context

    def name_request(self, response: str) -> None:
        """Its response has an id."""
        record_trace(response, self.trace)
        self.record.request = response
        if self.span is not None:
            self.span.response = response

    def query(self) -> list[tuple[str, str]]:
        """Returns the names and values behind the path, in their order; the limit of a head bounds them."""
        return parse_qsl(self.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)

    async def body(self) -> bytes:
        """Returns the body, also when asked again. What it holds of the budget, it holds until `close`.

        Raises RequestError: 413 where it is too large, which a declared length shows before anything is read; 408 where
        the client is too slow; 503 where other bodies leave no room; 400 where the client left.
        """
        assert not self._released, "nobody asks for a body behind its release"
        if self._body is not None:
            return self._body
        limits, most, loop = self.limits, self.limits.most, asyncio.get_running_loop()
        declared = self.headers.get(b"content-length", b"")
        length = min(int(declared[:20]), most + 1) if declared.isdigit() else None
        if length is not None and length > most:
            raise _too_large(most)
        parts = io.BytesIO()  # it gives what it holds without a copy, during which nobody else had a turn
        size, left = 0, limits.timeout
        while not self._body_read:
            if left <= 0:
                raise _too_late(limits.timeout)
            await limits.budget.take(self._lease, limits.leased(size, length))
            began = loop.time()
            try:
                part = await self._part_within(min(left, limits.stall_timeout))
            except TimeoutError:
                raise (_stalled(limits) if limits.stall_timeout < left else _too_late(limits.timeout)) from None
            left = max(0.0, left - (loop.time() - began))
            size += len(part)
            if size > most:
                raise _too_large(most)
            parts.write(part)
        limits.budget.give_back(self._lease, min(size, self._lease.held))
        self._body = parts.getvalue()
        return self._body

    async def hold(self, size: int, *, answers: bool = True) -> None:
        """Counts so many bytes (of the answer, or not) as the body is counted, until the call ends; what is larger than
        all that bodies may hold waits until it is alone. Raises RequestError 503 where there is no room in time."""
        budget, self._answer_held = self.limits.budget, self._answer_held or answers
        await budget.take(self._lease, min(self._lease.held + size, int(budget.limit * LARGE_SHARE)))

    def release_body(self) -> None:
        """Gives up the body, and what it holds of the budget, while its request goes on without."""
        self._body, self._released = None, True
        self.limits.budget.give_back(self._lease, 0)

    async def pieces(self, max_bytes: int, *, held: bool = False) -> AsyncIterator[bytes]:
        """Yields the body as it arrives, for bodies that are never held as a whole; or that the caller holds, which
        counts as `body`'s do. Raises RequestError as `body` does; the time that the client has grows with what it has
        sent."""
        limits, loop = self.limits, asyncio.get_running_loop()
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > max_bytes:
            raise _too_large(max_bytes)
        await limits.budget.take(self._lease, 2 * READ_BYTES)
        size, deadline = 0, loop.time() + limits.timeout
        while not self._body_read:
            try:
                part = await self._part_within(limits.stall_timeout)
            except TimeoutError:
                raise _stalled(limits) from None
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            if loop.time() > deadline + size / MIN_RATE:
                raise RequestError(408, f"the body came slower than {MIN_RATE} bytes per second")
            if held:
                await limits.budget.take(self._lease, size + 2 * READ_BYTES)
            yield part

    def close(self) -> None:
        """Gives back what the body holds of the budget: the request has ended."""
        self._lease.closed = True
        self.limits.budget.give_back(self._lease, 0)

    async def unless_left(self, work: Coroutine[Any, Any, R]) -> R:
        """Returns what `work` comes to. It is cancelled when the client leaves; raises RequestError 400 then."""
        if self.connection.is_closing():
            work.close()
            raise _left()
        task, left = asyncio.current_task(), False
        assert task is not None

        def leave() -> None:
            nonlocal left
            left = True
            task.cancel()

        self.connection.on_lost = leave
        try:
            return await work
        except asyncio.CancelledError:
            if not left or task.cancelling() > 1:
                raise
            raise _left() from None
        finally:
            self.connection.on_lost = None
            if left:
                task.uncancel()

    async def _part_within(self, seconds: float) -> bytes:
        """Raises TimeoutError, and RequestError as `_part` does. The loop hears its clock before its sockets: where the
        process itself got no time, what came meanwhile is there at a second look."""
        try:
            async with asyncio.timeout(seconds):
                return await self._part()
        except TimeoutError:
            async with asyncio.timeout(SECOND_LOOK):
                return await self._part()

    async def _part(self) -> bytes:
        """The next piece of the body. Raises RequestError where the client has left."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._body_read = True
            raise RequestError(400, "the client closed the connection within the body")
        self._body_read = not message.get("more_body", False)
        return message.get("body", b"")  # type: ignore[no-any-return]

    async def start(self, status: int, content_type: bytes, headers: Headers = ()) -> None:
        """Sends a response's status and headers."""
        self.record.status = status
        own = [(b"content-type", content_type), *((name, self.id.encode()) for name in self._shape.id_headers)]
        sent = [*own, *self.limit_headers, *headers]
        await self.send({"type": "http.response.start", "status": status, "headers": sent})

    async def end(self) -> None:
        """Ends a body that was started."""
        self.connection.flush()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def respond(self, body: bytes, status: int = 200, content_type: bytes = JSON, headers: Headers = ()) -> None:
        """Sends a complete response; a large one is held until its client has read it. Raises RequestError."""
        if len(body) >= MEMORY_BODY and not self._answer_held:
            await self.hold(len(body))
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, content_type, [length, *headers])
        waits = self._answer_held and len(body) > SMALL_BODY
        await self.send({"type": "http.response.body", "body": body, "more_body": waits})
        if waits:
            try:
                async with asyncio.timeout(self.limits.timeout + len(body) / MIN_RATE):
                    await self.send({"type": "http.response.body", "body": b"", "more_body": False})
            except TimeoutError:
                self.connection.abort()

    async def respond_json(self, value: Any, status: int = 200, headers: Headers = ()) -> None:
        """Sends a value as JSON."""
        await self.respond(msgspec.json.encode(value), status, JSON, headers)

    async def refuse(self, error: RequestError) -> None:
        """Sends an error as clients of the call's API expect it. Where the body was not read to its end, the connection
        closes."""
        ERRORS.labels(str(error.status)).inc()
        self.record.param, self.record.code = error.param and error.param[:PARAM_SHOWN], error.code
        headers = list[tuple[bytes, bytes]]()
        if error.retry_after is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after))).encode()))
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        body = self._shape.error_body(error, self.id)
        if error.status not in (408, 413):
            await self.respond(body, error.status, JSON, headers)
            return
        headers += [(b"connection", b"close"), (b"content-length", str(len(body)).encode())]
        await self.start(error.status, JSON, headers)
        await self.send({"type": "http.response.body", "body": body, "more_body": True})
        await self._linger()
        await self.end()

    async def _linger(self) -> None:
        """Reads what the client is still sending: closing before would reset the connection, and the client might never
        see the response."""
        taken = 0
        with contextlib.suppress(TimeoutError, RequestError):
            async with asyncio.timeout(LINGER_SECONDS):
                while taken < LINGER_BYTES and not self._body_read:
                    taken += len(await self._part())


def _left() -> RequestError:
    return RequestError(400, "the client closed the connection")


def _stalled(limits: BodyLimits) -> RequestError:
    return RequestError(408, f"nothing of the body came for {limits.stall_timeout:g} s")


def _too_late(seconds: float) -> RequestError:
    return RequestError(408, f"the body did not arrive within {seconds:g} s")


def _too_large(limit: int) -> RequestError:
    return RequestError(413, f"body: larger than the {limit} bytes that are allowed", param="body", code="too_large")
