"""One HTTP call: its headers, its bounded body, and a plain response."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import secrets
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from services.gateway.api.errors import ApiError
from services.gateway.metrics import ERRORS

JSON = b"application/json"
BODY_TIMEOUT = 60.0
"""Seconds that a client may take to send a body."""

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

LINGER_SECONDS = 2.0
LINGER_BYTES = 64 * 2**20
"""What is still taken in of a body that was refused."""

Headers = Iterable[tuple[bytes, bytes]]


class Call:
    """Owns the exchange of one request and one response with uvicorn."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self._receive, self.send = scope, receive, send
        self._read = False
        """Whether the body has been read to its end."""
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self._headers.get(b"x-request-id", b"")
        self.given_id = given.decode() if _REQUEST_ID.fullmatch(given) else None
        self.id = self.given_id or secrets.token_hex(16)

    def header(self, name: bytes) -> bytes | None:
        return self._headers.get(name)

    @property
    def trace(self) -> str | None:
        """The client's W3C trace context, where it is one."""
        given = self._headers.get(b"traceparent", b"")
        return given.decode() if _TRACEPARENT.fullmatch(given) else None

    async def body(self, limit: int) -> bytes:
        """Raises ApiError 413 above `limit` bytes, 408 where the client is too slow, 400 where it left."""
        declared = self._headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                while not self._read:
                    part = await self._part()
                    size += len(part)
                    if size > limit:
                        raise _too_large(limit)
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT:g} s") from None
        return b"".join(parts)

    async def _part(self) -> bytes:
        """The next piece of the body. Raises ApiError where the client has left."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._read = True
            raise ApiError(400, "the client closed the connection within the body")
        self._read = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    async def start(self, status: int, content_type: bytes, headers: Headers = ()) -> None:
        own = [(b"content-type", content_type), (b"x-request-id", self.id.encode())]
        await self.send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})

    async def end(self, body: bytes = b"") -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def respond(self, body: bytes, status: int = 200, content_type: bytes = JSON, headers: Headers = ()) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, content_type, [length, *headers])
        await self.end(body)

    async def respond_json(self, value: Any, status: int = 200, headers: Headers = ()) -> None:
        await self.respond(msgspec.json.encode(value), status, JSON, headers)

    async def refuse(self, error: ApiError) -> None:
        """The error as OpenAI's clients expect it. A body that was not read to its end closes the connection."""
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
        """Takes in what the client is still sending: closing on unread data would reset the connection, and the
        client might never see its answer."""
        taken = 0
        with contextlib.suppress(TimeoutError, ApiError):
            async with asyncio.timeout(LINGER_SECONDS):
                while taken < LINGER_BYTES and not self._read:
                    taken += len(await self._part())


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"body: larger than the {limit} bytes that are allowed", param="body", code="too_large")
