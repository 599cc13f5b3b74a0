"""One HTTP call: its headers, its bounded body, its connection, and a plain response."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import secrets
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from services.gateway.api.errors import RequestError
from services.gateway.metrics import ERRORS

EXTENSION = "baton.connection"
"""Key in the ASGI scope's extensions under which the connection is found."""
JSON = b"application/json"
BODY_TIMEOUT = 60.0
"""Seconds that a client may take to send a body."""

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

LINGER_SECONDS = 2.0
LINGER_BYTES = 64 * 2**20
"""How long, and how much of, a refused body is still read."""

Headers = Iterable[tuple[bytes, bytes]]


class ClientConnection(Protocol):
    """What an endpoint needs of the client's connection."""

    on_lost: Callable[[], None] | None
    """Called once when the client leaves."""

    def is_closing(self) -> bool:
        """Returns whether the client has left."""

    def write_chunk(self, data: bytes) -> None:
        """Writes one chunk of a streamed response."""

    def unread(self) -> int:
        """Returns the bytes that the client has left unread."""

    def abort(self) -> None:
        """Closes the connection at once."""


class Call:
    """Owns one request and its response, as ASGI passes them between uvicorn and an endpoint."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self._receive, self.send = scope, receive, send
        self.connection: ClientConnection = scope["extensions"][EXTENSION]
        self._body_read = False
        """Whether the body has been read to its end."""
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self._headers.get(b"x-request-id", b"")
        self.client_id = given.decode() if _REQUEST_ID.fullmatch(given) else None
        self.id = self.client_id or secrets.token_hex(16)

    def header(self, name: bytes) -> bytes | None:
        """Returns a header by its lower-case name."""
        return self._headers.get(name)

    async def body(self, limit: int) -> bytes:
        """Returns the body. Raises RequestError: 413 above `limit` bytes, 408 where the client is too slow, 400 where
        it left."""
        declared = self._headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                while not self._body_read:
                    part = await self._part()
                    size += len(part)
                    if size > limit:
                        raise _too_large(limit)
                    parts.append(part)
        except TimeoutError:
            raise RequestError(408, f"the body did not arrive within {BODY_TIMEOUT:g} s") from None
        return b"".join(parts)

    async def _part(self) -> bytes:
        """The next piece of the body. Raises RequestError where the client has left."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._body_read = True
            raise RequestError(400, "the client closed the connection within the body")
        self._body_read = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    async def start(self, status: int, content_type: bytes, headers: Headers = ()) -> None:
        """Sends a response's status and headers."""
        own = [(b"content-type", content_type), (b"x-request-id", self.id.encode())]
        await self.send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})

    async def end(self) -> None:
        """Ends a body that was started."""
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def respond(self, body: bytes, status: int = 200, content_type: bytes = JSON, headers: Headers = ()) -> None:
        """Sends a complete response."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, content_type, [length, *headers])
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def respond_json(self, value: Any, status: int = 200, headers: Headers = ()) -> None:
        """Sends a value as JSON."""
        await self.respond(msgspec.json.encode(value), status, JSON, headers)

    async def refuse(self, error: RequestError) -> None:
        """Sends an error as OpenAI's clients expect it. Where the body was not read to its end, the connection
        closes."""
        ERRORS.labels(str(error.status)).inc()
        headers: list[tuple[bytes, bytes]] = []
        if error.retry_after is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after))).encode()))
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if error.status not in (408, 413):
            await self.respond(error.body(), error.status, JSON, headers)
            return
        body = error.body()
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


def _too_large(limit: int) -> RequestError:
    return RequestError(413, f"body: larger than the {limit} bytes that are allowed", param="body", code="too_large")
