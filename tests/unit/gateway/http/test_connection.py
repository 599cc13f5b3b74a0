"""Writing parts of a streamed response to a client's connection."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from services.gateway.http import connection as module
from services.gateway.http.connection import (
    MAX_BEGUN,
    MAX_PIPELINED,
    MIN_PIECE_BYTES,
    Connection,
    ReadBudget,
    RequestStarts,
    UnflushedConnections,
)


class Socket(asyncio.Transport):
    """Keeps what each write gave it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False
        self.paused = False

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.closed:
            raise RuntimeError("the handler is closed")  # as uvloop's does
        self.writes.append(bytes(data))


async def _no_app(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("no request comes")


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the path, and how many headers there were and how much of a body."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    answer = b"%b %d %d;" % (scope["path"].encode(), len(scope["headers"]), size)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(answer))]})
    await send({"type": "http.response.body", "body": answer})


def _connected(
    unflushed: UnflushedConnections,
    app: ASGIApp = _no_app,
    turns: ReadBudget | None = None,
    starts: RequestStarts | None = None,
) -> tuple[Connection, Socket]:
    config = uvicorn.Config(app, http=Connection, ws="none", lifespan="off", log_config=None, interface="asgi3")
    config.load()
    shared = (unflushed, turns or ReadBudget(), starts or RequestStarts())
    connection = Connection(*shared, config=config, server_state=ServerState(), app_state={})
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


def _answers(socket: Socket) -> list[bytes]:
    return re.findall(rb"\r\n\r\n(/[^;]*;)", b"".join(socket.writes))


async def _turns(done: Callable[[], bool]) -> int:
    """How many turns of the loop pass until something is done."""
    for turn in range(100_000):
        if done():
            return turn
        await asyncio.sleep(0)
    raise AssertionError("it was not done")


async def test_of_requests_that_come_at_once_few_wait_in_memory_and_all_are_answered_in_order() -> None:
    connection, socket = _connected(UnflushedConnections(), _echo)
    requests = [b"GET /%d HTTP/1.1\r\n\r\n" % number for number in range(500)]
    connection.data_received(b"".join(requests))
    assert socket.paused
    most = MAX_PIPELINED + MIN_PIECE_BYTES // len(requests[0])
    assert len(connection.pipeline) <= most
    await _turns(lambda: len(_answers(socket)) == len(requests))
    assert _answers(socket) == [b"/%d 0 0;" % number for number in range(500)]
    assert not socket.paused
    connection.connection_lost(None)


@pytest.mark.parametrize(
    "flood",
    [
        b"GET /flood HTTP/1.1\r\n\r\n" * 1500,
        b"POST /flood HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n",
    ],
    ids=["requests", "chunks"],
)
async def test_who_sends_much_that_is_small_leaves_others_their_turn(
    flood: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_SECONDS", 1e-9)
    unflushed, turns = UnflushedConnections(), ReadBudget()
    (hostile, of_hostile), (good, of_good) = (_connected(unflushed, _echo, turns) for _ in range(2))
    hostile.data_received(flood)
    good.data_received(b"GET /good HTTP/1.1\r\n\r\n")
    assert await _turns(lambda: _answers(of_good) == [b"/good 0 0;"]) < 20
    assert of_hostile.paused
    expected = flood.count(b"/flood")
    assert await _turns(lambda: len(_answers(of_hostile)) == expected) > 20
    assert _answers(of_hostile)[-1] == b"/flood %d %d;" % ((0, 0) if expected > 1 else (1, 20_000))
    for connection in (hostile, good):
        connection.connection_lost(None)


async def test_of_requests_that_come_together_a_few_begin_in_each_turn() -> None:
    """Whether they are the first of their connections or not."""
    unflushed, turns, starts = UnflushedConnections(), ReadBudget(), RequestStarts()
    begun = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal begun
        begun += 1
        await _echo(scope, receive, send)

    clients = [_connected(unflushed, app, turns, starts) for _ in range(3 * MAX_BEGUN)]
    for connection, _ in clients:
        connection.data_received(b"GET /1 HTTP/1.1\r\n\r\nGET /2 HTTP/1.1\r\n\r\n")
    while begun < 2 * len(clients):
        before = begun
        await asyncio.sleep(0)
        assert begun <= before + 2 * MAX_BEGUN, "which task of a turn is awake first is not said"
    await _turns(lambda: all(_answers(socket) == [b"/1 0 0;", b"/2 0 0;"] for _, socket in clients))
    for connection, _ in clients:
        connection.connection_lost(None)


async def test_bodies_that_arrive_together_take_no_turn_for_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn may take milliseconds, where the loop has other things to do."""
    monkeypatch.setattr(module, "READ_SECONDS", 0.0)
    unflushed, turns = UnflushedConnections(), ReadBudget()
    clients = [_connected(unflushed, _echo, turns) for _ in range(3)]
    head = b"POST /body HTTP/1.1\r\ncontent-length: 250000\r\n\r\n"
    for connection, _ in clients:
        connection.data_received(head + bytes(250_000))
    monkeypatch.setattr(module, "READ_SECONDS", 60.0)
    assert await _turns(lambda: all(_answers(socket) == [b"/body 1 250000;"] for _, socket in clients)) < 10
    for connection, _ in clients:
        connection.connection_lost(None)


@pytest.mark.parametrize(
    "between", [b"0\r\n" + b"a: b\r\n" * 30_000, b"0\r\na: " + b"b" * 200_000, b"1;" + b"b" * 200_000]
)
async def test_what_is_neither_head_nor_body_is_bounded(between: bytes) -> None:
    connection, socket = _connected(UnflushedConnections(), _echo)
    connection.data_received(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n" + between)
    await _turns(lambda: socket.closed)
    assert b"".join(socket.writes).startswith(b"HTTP/1.1 431")
    connection.connection_lost(None)


async def test_headers_behind_a_body_are_nobodys() -> None:
    connection, socket = _connected(UnflushedConnections(), _echo)
    connection.data_received(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\na: b\r\n\r\n")
    await _turns(lambda: bool(_answers(socket)))
    assert _answers(socket) == [b"/ 1 1;"]
    connection.connection_lost(None)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_chunks_are_for_clients_that_know_them(version: bytes) -> None:
    """What is streamed to others ends with the connection; what has a length has it for all."""

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        length = [(b"content-length", b"5")] if scope["path"] == "/whole" else []
        await send({"type": "http.response.start", "status": 200, "headers": length})
        if not length:
            connection.write_chunk(b"one")
            connection.flush()
        await send({"type": "http.response.body", "body": b"two", "more_body": True})
        await send({"type": "http.response.body", "body": b"34"})

    for path, body in (
        (b"/", b"onetwo34" if version == b"1.0" else b"3\r\none\r\n3\r\ntwo\r\n2\r\n34\r\n0\r\n\r\n"),
        (b"/whole", b"two34"),
    ):
        connection, socket = _connected(UnflushedConnections(), stream)
        connection.data_received(b"GET %b HTTP/%b\r\nhost: x\r\n\r\n" % (path, version))
        await _turns(lambda socket=socket, body=body: b"".join(socket.writes).endswith(body))  # type: ignore[misc]
        head, _, sent = b"".join(socket.writes).partition(b"\r\n\r\n")
        assert sent == body
        assert (b"transfer-encoding" in head) == (version == b"1.1" and path == b"/")
        assert (b"connection: close" in head, socket.closed) == ((version == b"1.0"),) * 2
