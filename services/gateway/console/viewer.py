"""One page's connection, to which server-sent events are written as long as it reads them."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec

MAX_UNREAD = 2**20
"""Bytes that a viewer may leave unread; beyond it its connection is closed, and its page asks again."""


class ViewerConnection(Protocol):
    """What is needed of a viewer's connection."""

    def write_chunk(self, data: bytes) -> None:
        """Writes a part of the response."""

    def unread(self) -> int:
        """Returns the bytes that the client has left unread."""

    def abort(self) -> None:
        """Closes the connection at once."""


class ConsoleViewer:
    """Owns one page's connection. A patch goes to those that have the document that it changes."""

    def __init__(self, connection: ViewerConnection) -> None:
        self._connection = connection
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Done when nothing more is written; whether the client may be told so."""
        self.started = False
        """Whether it has a document."""

    def write(self, event: bytes) -> None:
        """Writes an event, or gives the viewer up where it does not read."""
        if self.ended.done():
            return
        if self._connection.unread() > MAX_UNREAD:
            self._connection.abort()
            self.end(told=False)
            return
        self.started = True
        self._connection.write_chunk(event)

    def end(self, *, told: bool) -> None:
        """Writes no more. `told`: the connection is still there."""
        if not self.ended.done():
            self.ended.set_result(told)


def event_bytes(name: bytes, data: Any) -> bytes:
    """Returns a server-sent event with `data` as JSON."""
    return b"event: %b\ndata: %b\n\n" % (name, msgspec.json.encode(data))
