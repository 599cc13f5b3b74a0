"""Calls the gateway's HTTP application without HTTP: same code, same bodies, no socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from starlette.types import ASGIApp, Message

from services.gateway.http.connection import EXTENSION

LEAVE_SECONDS = 10.0
"""What the gateway gets to take notice that nobody waits any more."""


class Answer(NamedTuple):
    status: int
    request_id: str
    body: bytes


class _HereAndNow:
    """The connection of a client that is the process itself: it reads everything at once."""

    def __init__(self) -> None:
        self.on_lost: Callable[[], None] | None = None
        self._left = False

    @property
    def transport(self) -> _HereAndNow:
        return self

    def is_closing(self) -> bool:
        return self._left

    def leave(self) -> None:
        """The client wants no answer any more."""
        self._left = True
        if self.on_lost is not None:
            self.on_lost()

    def write_chunk(self, data: bytes) -> None:
        raise AssertionError("nothing is streamed here")

    def unread(self) -> int:
        return 0

    def abort(self) -> None:
        raise AssertionError("nobody is slow here")


async def call(app: ASGIApp, method: str, path: str, body: bytes, request_id: str | None = None) -> Answer:
    """One request, not streamed, and its whole answer. Cancelling it is the client's leaving."""
    status, headers, parts = 500, {}, list[bytes]()

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message["headers"])
        else:
            parts.append(message.get("body", b""))

    connection = _HereAndNow()
    answering = asyncio.ensure_future(app(_scope(method, path, body, request_id, connection), receive, send))
    try:
        await asyncio.shield(answering)
    except asyncio.CancelledError:
        connection.leave()
        await asyncio.wait([answering], timeout=LEAVE_SECONDS)
        raise
    return Answer(status, headers.get(b"x-request-id", b"").decode(), b"".join(parts))


def _scope(method: str, path: str, body: bytes, request_id: str | None, connection: _HereAndNow) -> dict[str, object]:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if request_id is not None:
        headers.append((b"x-request-id", request_id.encode()))
    return {
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
        "extensions": {EXTENSION: connection},
    }
