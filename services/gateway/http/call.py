"""One HTTP call: its headers, its body within what all bodies may take together, its connection, and a plain
response."""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import re
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from services.gateway.api.errors import RequestError
from services.gateway.api.response import ResponseOutcome
from services.gateway.core.api_keys import ANONYMOUS
from services.gateway.http.bodies.body_budget import (
    LARGE_SHARE,
    MEMORY_BODY,
    READ_BYTES,
    SMALL_BODY,
    BodyLease,
    BodyLimits,
)
from services.gateway.metrics import ERRORS
from shared.ids import ModelName
from shared.telemetry.logs import record_trace
from shared.telemetry.tracing import RequestSpan

R = TypeVar("R")

EXTENSION = "baton.connection"
"""Key in the ASGI scope's extensions under which the connection is found."""
KEY_EXTENSION = "baton.key"
"""Key under which a call of this process itself says whose it is. What comes over HTTP has no such extension."""
JSON = b"application/json"
MIN_RATE = 64 * 2**10
"""Bytes per second at which a body that is read piece by piece must arrive, and an answer that is held be read, behind
the first `timeout` seconds."""
MAX_LOOP_BODY = 128 * 2**10
"""Of a body that is read on the event loop: more than the metadata of a chat can have."""
MAX_PARAMETERS = 128
"""Behind a path. Thousands, which a head has room for, took a turn of the event loop 0.2 s."""
SECOND_LOOK = 0.1
"""Seconds for what came while the gateway itself got no time."""
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
        """Returns the names and values behind the path, in their order. Raises RequestError 400 where there are too
        many."""
        text = self.scope.get("query_string", b"").decode("latin-1")
        try:
            return parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_PARAMETERS)
        except ValueError:
            raise RequestError(400, f"query: more than {MAX_PARAMETERS} parameters", param="query") from None

    async def small_body(self) -> bytes:
        """Returns a body that is read on the event loop, which is never large. Raises RequestError as `body` does."""
        self.limits = self.limits._replace(max_bytes=min(MAX_LOOP_BODY, self.limits.max_bytes), media=False)
        return await self.body()

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
            await self._take(limits.leased(size, length))
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
        self._answer_held = self._answer_held or answers
        await self._take(min(self._lease.held + size, int(self.limits.budget.limit * LARGE_SHARE)))

    async def hold_answer(self, size: int) -> None:
        """Counts an answer of so many bytes, where that is large: before what was done for it is kept, so that whoever
        is refused has nothing of it. Raises RequestError as `hold` does."""
        if size >= MEMORY_BODY and not self._answer_held:
            await self.hold(size)

    async def _take(self, size: int) -> None:
        if not self._lease.held:
            self._lease.key = self.key.name
        await self.limits.budget.take(self._lease, size)

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
        await self._take(2 * READ_BYTES)
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
                await self._take(size + 2 * READ_BYTES)
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
        await self.hold_answer(len(body))
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
