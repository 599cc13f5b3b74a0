"""Writing parts of a streamed response to a client's connection."""

from __future__ import annotations

import asyncio

import uvicorn
from uvicorn.server import ServerState

from services.gateway.http.connection import Connection, UnflushedConnections


class Socket(asyncio.Transport):
    """Keeps what each write gave it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.closed:
            raise RuntimeError("the handler is closed")  # as uvloop's does
        self.writes.append(bytes(data))


async def _app(scope: object, receive: object, send: object) -> None:
    raise AssertionError("no request comes")


def _connected(unflushed: UnflushedConnections) -> tuple[Connection, Socket]:
    config = uvicorn.Config(_app, http=Connection, ws="none", lifespan="off", log_config=None, interface="asgi3")
    config.load()
    connection = Connection(unflushed, config=config, server_state=ServerState(), app_state={})
    connection.connection_made(socket := Socket())
    return connection, socket


async def test_what_one_turn_of_the_loop_makes_is_one_write_for_each_client() -> None:
    unflushed = UnflushedConnections()
    (first, of_first), (second, of_second) = _connected(unflushed), _connected(unflushed)
    for part in (b"one", b"two"):
        first.write_chunk(part)
        second.write_chunk(part[:1])
    assert of_first.writes == of_second.writes == []
    await asyncio.sleep(0)
    assert of_first.writes == [b"6\r\nonetwo\r\n"]
    assert of_second.writes == [b"2\r\not\r\n"]
    first.write_chunk(b"three")
    await asyncio.sleep(0)
    assert (of_first.writes[1:], of_second.writes[1:]) == ([b"5\r\nthree\r\n"], [])


async def test_what_is_flushed_before_the_turn_ends_is_written_once() -> None:
    connection, socket = _connected(UnflushedConnections())
    connection.write_chunk(b"last")
    connection.flush()
    socket.write(b"0\r\n\r\n")
    await asyncio.sleep(0)
    assert socket.writes == [b"4\r\nlast\r\n", b"0\r\n\r\n"]


async def test_a_client_that_leaves_within_the_turn_keeps_nothing_from_others() -> None:
    unflushed = UnflushedConnections()
    (first, of_first), (second, of_second) = _connected(unflushed), _connected(unflushed)
    for connection in (first, second):
        connection.write_chunk(b"token")
    of_first.closed = True
    await asyncio.sleep(0)
    assert (of_first.writes, of_second.writes) == ([], [b"5\r\ntoken\r\n"])
