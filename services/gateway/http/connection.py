"""One client connection: uvicorn's, with the two things that it does not offer.

A chunk of a streamed response can be written from wherever it arises, with no task to wake and no layer between; and
whoever answers learns at once that the client is gone. Besides, a request head is bounded in size and time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

EXTENSION = "baton.connection"
"""Key in the ASGI scope's extensions under which the connection is found."""
MAX_HEAD_BYTES = 65_536
HEAD_TIMEOUT = 30.0
"""Seconds from connecting, or from a further request's first byte, to the end of its head."""

REFUSED_HEAD = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Transport(Protocol):
    def is_closing(self) -> bool: ...


class ClientConnection(Protocol):
    """What an endpoint needs of the connection that it answers."""

    on_lost: Callable[[], None] | None

    @property
    def transport(self) -> Transport: ...

    def write_chunk(self, data: bytes) -> None: ...

    def unread(self) -> int: ...

    def abort(self) -> None: ...


class Connection(HttpToolsProtocol):
    """Owns the transport between a response's start and its end, which both go by ASGI's `send`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.on_lost: Callable[[], None] | None = None
        self._head_bytes = 0
        self._in_head = True
        self._expect_head()
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)
        if self.on_lost is not None:
            lost, self.on_lost = self.on_lost, None
            lost()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_timer.cancel()
        self._expect_head()
        self.scope["extensions"] = {EXTENSION: self}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        self._head_timer.cancel()
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.write(REFUSED_HEAD)
                self.transport.close()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self._head_overdue)

    def _head_overdue(self) -> None:
        self.transport.close()

    def write_chunk(self, data: bytes) -> None:
        """Writes one chunk of a response that has been started by `send`, and neither ended nor given a length."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def unread(self) -> int:
        """Bytes that the client has left unread on our side, once they are many enough for the transport to say."""
        return self.transport.get_write_buffer_size() if self.flow.write_paused else 0

    def abort(self) -> None:
        """Cuts the client off in the middle of its answer."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # so that uvicorn does not take the missing end for a bug of ours
        self.transport.abort()


def connection_of(scope: Any) -> ClientConnection:
    connection: ClientConnection = scope["extensions"][EXTENSION]
    return connection
