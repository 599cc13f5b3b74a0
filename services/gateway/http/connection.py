"""One client connection: uvicorn's, with what it does not offer.

A chunk of a streamed response can be written from where it is made, without waking a task; an endpoint learns at once
that its client has left; and a request's head is bounded in size and time.

What a turn of the event loop makes for a client goes to its socket in one piece: where steps come faster than the
gateway gets to run, a turn takes in several, and each system call costs as much as making a token's event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.http.call import EXTENSION

MAX_HEAD_BYTES = 65_536
HEAD_TIMEOUT = 30.0
"""Seconds from connecting, or from a further request's first byte, to the end of its head."""

HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class UnflushedConnections:
    """Owns which connections have chunks that their sockets have not been given; the loop's next turn gives them."""

    def __init__(self) -> None:
        self._connections: list[Connection] = []

    def add(self, connection: Connection) -> None:
        """Its first chunk since it was flushed."""
        if not self._connections:
            connection.loop.call_soon(self._flush)
        self._connections.append(connection)

    def _flush(self) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.flush()


class Connection(HttpToolsProtocol):
    """Owns the transport while a response is streamed; the response's start and end go through ASGI's `send`."""

    def __init__(self, unflushed: UnflushedConnections, **options: Any) -> None:
        """`options`: uvicorn's."""
        super().__init__(**options)
        self._unflushed = unflushed
        self._chunks: list[bytes] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer of the first head."""
        self.on_lost: Callable[[], None] | None = None
        self._head_bytes = 0
        self._in_head = True
        self._expect_head()
        self._served: Any = None
        """The cycle of the request that is being answered; `cycle` is that of the last one that came."""
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Calls `on_lost` exactly once when the connection has ended. Uvicorn tells the last request that came, which
        may wait behind the one that is being answered."""
        self._head_timer.cancel()
        self._disconnect()
        super().connection_lost(exc)
        if self.on_lost is not None:
            lost, self.on_lost = self.on_lost, None
            lost()

    def on_message_begin(self) -> None:
        """A request starts: puts this connection where its `Call` finds it."""
        super().on_message_begin()
        self._in_head = True
        self._head_timer.cancel()
        self._expect_head()
        self.scope["extensions"] = {EXTENSION: self}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        """The head has arrived in time."""
        self._head_timer.cancel()
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()
        if not self.pipeline:
            self._served = self.cycle
        self.flow.pause_reading()

    def on_body(self, body: bytes) -> None:
        """Takes a piece of the body, and no more before the endpoint asks for it: what waits for admission, or for
        room, does not fill the memory."""
        super().on_body(body)
        if self.cycle is not None and not self.cycle.response_complete:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        """The body has arrived: reads on, as only a reading connection shows that its client leaves."""
        super().on_message_complete()
        if not self.pipeline:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """The next of the requests that wait is answered."""
        if self.pipeline:
            self._served = self.pipeline[-1][0]
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        """Counts the bytes of a head, and closes the connection with a 431 above the limit."""
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.write(HEAD_TOO_LARGE)
                self.transport.close()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, lambda: self.transport.close())

    def write_chunk(self, data: bytes) -> None:
        """Writes a part of a response that `send` has started, and neither ended nor given a length."""
        if not self._chunks:
            self._unflushed.add(self)
        self._chunks.append(data)

    def flush(self) -> None:
        """Gives the socket what was written until now; nothing to one that has closed since, which would raise and keep
        what others wrote from theirs."""
        chunks, self._chunks = self._chunks, []
        if chunks and not self.transport.is_closing():
            data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def is_closing(self) -> bool:
        """Returns whether the client has left, or will be disconnected. Uvicorn is told so at once: it hears of the end
        a moment later, and would answer an application that gave up meanwhile with an error, which raises."""
        closing: bool = self.transport.is_closing()
        if closing:
            self._disconnect()
        return closing

    def unread(self) -> int:
        """Returns the bytes that the client has left unread; 0 until they exceed the transport's high-water mark."""
        return self.transport.get_write_buffer_size() if self.flow.write_paused else 0

    def abort(self) -> None:
        """Closes the connection in the middle of a response."""
        self._disconnect()  # otherwise uvicorn logs the missing end as a bug of the application
        self.transport.abort()

    def _disconnect(self) -> None:
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.message_event.set()
