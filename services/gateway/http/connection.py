"""One client connection: uvicorn's, with what it does not offer.

A chunk of a streamed response can be written from where it is made, without waking a task; an endpoint learns at once
that its client has left; and a request's head is bounded in size and time.

What a turn of the event loop makes for a client goes to its socket in one piece: where steps come faster than the
gateway gets to run, a turn takes in several, and each system call costs as much as making a token's event.

What clients send is read in pieces, and all of them together get a few milliseconds of each turn: 256 KiB, which the
loop takes from a socket at once, may be 14,000 requests, or as many chunks or headers, and hold up everybody for half a
second. Of the requests that are read, a few begin in each turn, however many connections they are of.
"""

from __future__ import annotations

import asyncio
import select
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.http.call import EXTENSION

MAX_HEAD_BYTES = 65_536
"""Of a head, and of what is neither head nor body: extensions of chunks, trailers."""
HEAD_TIMEOUT = 30.0
"""Seconds from connecting, or from a further request's first byte, to the end of its head."""

READ_SECONDS = 0.005
"""Of a turn of the loop, for reading what clients have sent."""
MIN_PIECE_BYTES = 4 * 2**10
MAX_PIECE_BYTES = 32 * 2**10
"""Of what was received, read at once: pieces grow while reading one takes less than CHEAP_SECONDS."""
CHEAP_SECONDS = 0.0002
MAX_PIPELINED = 16
"""Requests of a connection that wait behind the one that is answered, about; the rest is not read until they are
answered."""
MAX_BEGUN = 16
"""Requests that begin in a turn of the loop: each takes up to a millisecond until it waits for something."""
LOOK_SECONDS = 1.0
"""How often it is looked whether a client is there that has sent further requests: they keep its end from being
read."""
LEFT = getattr(select, "POLLRDHUP", 0) | getattr(select, "POLLHUP", 0) | getattr(select, "POLLERR", 0)

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


class ReadBudget:
    """Owns which connections have received what was not read yet, and how much of this turn of the loop is left for
    that."""

    def __init__(self) -> None:
        self._waiting: deque[Connection] = deque()
        self._spent: float | None = None
        """Seconds of this turn; None: nothing was read in it."""

    def may_read(self, loop: asyncio.AbstractEventLoop, *, again: bool = False) -> bool:
        """Whether there is time left in this turn; for another piece of a connection only where no other one waits."""
        if self._spent is None:
            self._spent = 0.0
            loop.call_soon(self._next_turn, loop)
        return self._spent < READ_SECONDS and not (again and self._waiting)

    def record(self, seconds: float) -> None:
        """So long did reading take."""
        self._spent = (self._spent or 0.0) + seconds

    def add(self, connection: Connection) -> None:
        """It has more to be read, when its turn comes."""
        self._waiting.append(connection)
        self.may_read(connection.loop)

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._spent = None
        while self._waiting and self.may_read(loop):  # a piece each: who has still more is behind the others then
            self._waiting.popleft().read_on()
        if self._waiting:
            self.may_read(loop)


class RequestStarts:
    """Owns how many requests have begun in this turn of the loop, and which ones wait for the next."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._begun = 0

    def begin(self, start: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        """Starts a request, in this turn where not many have begun in it; in the order in which they came."""
        if not self._begun:
            loop.call_soon(self._next_turn, loop)
        if self._begun < MAX_BEGUN:
            self._begun += 1
            start()
        else:
            self._waiting.append(start)

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._begun = min(MAX_BEGUN, len(self._waiting))
        if self._begun:
            loop.call_soon(self._next_turn, loop)
        for _ in range(self._begun):
            self._waiting.popleft()()


class _ReadFlow(FlowControl):
    """Owns whether the transport receives: not while something that it has received was not read."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.held = False
        self._wanted = True

    def pause_reading(self) -> None:
        self._wanted = False
        super().pause_reading()

    def resume_reading(self) -> None:
        self._wanted = True
        if not self.held:
            super().resume_reading()

    def hold(self) -> None:
        self.held = True
        super().pause_reading()

    def release(self) -> None:
        self.held = False
        if self._wanted:
            super().resume_reading()


class _UnframedCycle(RequestResponseCycle):
    """A request of HTTP/1.0, which knows no chunks: a body without a length ends with its connection."""

    without_length = False

    async def send(self, message: Any) -> None:
        """Uvicorn's: what is sent without a length is as long as it is."""
        if message["type"] == "http.response.start":
            if all(name.lower() != b"content-length" for name, _ in message["headers"]):
                self.chunked_encoding, self.without_length = False, True
        elif self.without_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class Connection(HttpToolsProtocol):
    """Owns the transport while a response is streamed; the response's start and end go through ASGI's `send`."""

    def __init__(
        self, unflushed: UnflushedConnections, turns: ReadBudget, starts: RequestStarts, **options: Any
    ) -> None:
        """`options`: uvicorn's."""
        super().__init__(**options)
        self._unflushed, self._turns, self._starts = unflushed, turns, starts
        self._received = b""
        """What was not read of what was received; then nothing more is received."""
        self._waits = False
        """Whether it is read on when its turn comes."""
        self._piece_bytes = MIN_PIECE_BYTES
        """How much of it is read at once."""
        self._chunks: list[bytes] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer of the first head."""
        self.on_lost: Callable[[], None] | None = None
        self._head_bytes = 0
        self._in_head = True
        self._expect_head()
        self._idle_read = False
        """Whether a piece was neither body nor the end of anything."""
        self._looking: asyncio.TimerHandle | None = None
        """While requests wait behind the one that is answered."""
        self._served: Any = None
        """The cycle of the request that is being answered; `cycle` is that of the last one that came."""
        super().connection_made(transport)
        self.flow: _ReadFlow = _ReadFlow(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Calls `on_lost` exactly once when the connection has ended. Uvicorn tells the last request that came, which
        may wait behind the one that is being answered."""
        self._head_timer.cancel()
        if self._looking is not None:
            self._looking.cancel()
        self._received = b""
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

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header; none behind a body, which nobody reads."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head has arrived in time."""
        self._head_timer.cancel()
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()
        if self.parser.get_http_version() < "1.1" and self.cycle is not None:
            self.cycle.__class__ = _UnframedCycle
        if not self.pipeline:
            self._served = self.cycle
        elif self._looking is None:
            self._looking = self.loop.call_later(LOOK_SECONDS, self._look)
        self.flow.pause_reading()

    def on_body(self, body: bytes) -> None:
        """Takes a piece of the body, and no more before the endpoint asks for it: what waits for admission, or for
        room, does not fill the memory."""
        self._idle_read = False
        super().on_body(body)
        if self.cycle is not None and not self.cycle.response_complete:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        """The body has arrived: reads on, as only a reading connection shows that its client leaves."""
        self._idle_read = False
        super().on_message_complete()
        if not self.pipeline:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """The next of the requests that wait is answered."""
        if self.pipeline:
            self._served = self.pipeline[-1][0]
        super().on_response_complete()
        if self.flow.held and not self._waits and len(self.pipeline) < MAX_PIPELINED:
            self._wait()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Uvicorn's: answers a request."""
        self._starts.begin(partial(super()._start_asgi_task, cycle, app), self.loop)

    def _look(self) -> None:
        """Ends the connection of a client that has left, or ended its sending direction, behind requests that nobody
        reads yet; Linux says so of a socket whatever is to be read of it."""
        self._looking = None
        if not self.pipeline or self.transport.is_closing():
            return
        if (client := self.transport.get_extra_info("socket")) is not None and LEFT:
            poll = select.poll()
            poll.register(client.fileno(), LEFT)
            if poll.poll(0):
                self.transport.close()
                return
        self._looking = self.loop.call_later(LOOK_SECONDS, self._look)

    def data_received(self, data: bytes) -> None:
        """Reads as much of it as there is time for, and receives nothing more until all of it is read."""
        self._received += data
        if not self.flow.held:
            self._piece_bytes = MIN_PIECE_BYTES
            self.read_on()

    def read_on(self) -> None:
        """Reads what was received, a piece after the other, as long as others need not wait for it."""
        received, at = self._received, 0
        self._waits = False
        if self.flow.held and self._in_head and received:
            self._expect_head()
        while at < len(received) and not self.transport.is_closing():
            if len(self.pipeline) >= MAX_PIPELINED:
                self._hold(received[at:])
                return
            if not self._turns.may_read(self.loop, again=at > 0):
                self._hold(received[at:])
                self._wait()
                return
            began, size = time.perf_counter(), self._piece_bytes
            self._read_piece(received if at == 0 and len(received) <= size else received[at : at + size])
            took, at = time.perf_counter() - began, at + size
            self._turns.record(took)
            self._piece_bytes = min(2 * size, MAX_PIECE_BYTES) if took < CHEAP_SECONDS else MIN_PIECE_BYTES
        self._received = b""
        if self.flow.held and not self.transport.is_closing():
            self.flow.release()

    def _hold(self, rest: bytes) -> None:
        """Keeps it until its turn comes, or until a response ends. The client is not to blame meanwhile."""
        self._received = rest
        self._head_timer.cancel()
        self.flow.hold()

    def _wait(self) -> None:
        self._waits = True
        self._turns.add(self)

    def _read_piece(self, piece: bytes) -> None:
        """Counts the bytes of a head, or of what is no body, and closes the connection with a 431 above the limit."""
        self._idle_read = True
        super().data_received(piece)
        if self.transport.is_closing():
            return
        if self._in_head or self._idle_read:
            self._head_bytes += len(piece)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.write(HEAD_TOO_LARGE)
                self.transport.close()
        else:
            self._head_bytes = 0

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
            plain = getattr(self._served, "without_length", False)
            self.transport.write(data if plain else b"%x\r\n%b\r\n" % (len(data), data))

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
