"""Calls of this process itself, by the same endpoints that clients reach over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from starlette.types import ASGIApp, Message

from services.gateway.core.api_keys import KeyName
from services.gateway.http.call import EXTENSION, KEY_EXTENSION

LEAVE_SECONDS = 10.0
"""Seconds that the gateway may take to notice that a call was abandoned."""


class LocalAnswer(NamedTuple):
    """A complete HTTP response."""

    status: int
    request_id: str
    body: bytes


class _LocalConnection:
    """The connection of a client in this process, which never reads too slowly."""

    def __init__(self) -> None:
        self.on_lost: Callable[[], None] | None = None
        self._left = False

    def is_closing(self) -> bool:
        return self._left

    def leave(self) -> None:
        self._left = True
        if self.on_lost is not None:
            self.on_lost()

    def write_chunk(self, data: bytes) -> None:
        raise AssertionError("nothing is streamed to this process")

    def flush(self) -> None:
        """Nothing waits here."""

    def unread(self) -> int:
        return 0

    def abort(self) -> None:
        raise AssertionError("a client in this process is never too slow")


async def local_call(
    app: ASGIApp, method: str, path: str, body: bytes, request_id: str | None, key: KeyName | None = None
) -> LocalAnswer:
    """Calls an ASGI application without HTTP: the same code and the same bodies, without a socket. `key`: whose call it
    is, where keys are required. Cancelling it gives the request up."""
    status, answer_headers, parts = 500, dict[bytes, bytes](), list[bytes]()

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, answer_headers
        if message["type"] == "http.response.start":
            status, answer_headers = message["status"], dict(message["headers"])
        else:
            parts.append(message.get("body", b""))

    connection = _LocalConnection()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if request_id is not None:
        headers.append((b"x-request-id", request_id.encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "extensions": {EXTENSION: connection, KEY_EXTENSION: key},
    }
    answering = asyncio.ensure_future(app(scope, receive, send))
    try:
        await asyncio.shield(answering)
    except asyncio.CancelledError:
        connection.leave()
        await asyncio.wait([answering], timeout=LEAVE_SECONDS)
        raise
    return LocalAnswer(status, answer_headers.get(b"x-request-id", b"").decode(), b"".join(parts))
