"""One TCP connection between two stores: frames on the event loop, payloads on a thread, with TLS or without.

Payloads go straight from the arena's memory to the socket, and from the socket to the arena's memory: no message is
ever put together. Frames are small, and are read and written by the event loop, so that a connection on which nothing
moves takes no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from kvstore.transfer.frames import PREFIX, Frame, body_length, decode_frame

Made = TypeVar("Made")

FRAME_SECONDS = 5.0
"""For the rest of a frame, once it has begun, and for writing one."""
STALL_SECONDS = 5.0
"""A payload of which nothing moves for so long is given up, or less than LOW_WATER."""
LOW_WATER = 256 * 1024
"""Bytes that are waited for before a payload is read on: fewer would wake the thread for each packet or two."""
MAX_BUFFERS = 64
"""Of one system call; the system's own limit is 1,024."""


class Disconnected(Exception):
    """The other side closed the connection, or nobody is there any more."""


class TcpConnection:
    """Owns one connected socket. One user at a time, on one event loop."""

    def __init__(self, sock: socket.socket, threads: Executor) -> None:
        """Takes over `sock`. `threads`: where payloads are moved."""
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._threads = threads
        self._low_water = 1

    async def secure(self, context: ssl.SSLContext, host: str | None) -> None:
        """Makes it a TLS connection; `host`: what the other side's certificate must name, None: this is the server's
        side. Raises OSError where the other side is not of the same authority, and Disconnected."""
        wrapped = context.wrap_socket(
            self._sock, server_side=host is None, server_hostname=host, do_handshake_on_connect=False
        )
        self._sock = wrapped
        await self._retried(wrapped.do_handshake, writes=False)

    # ---- frames, on the event loop

    async def read_frame(self, seconds: float) -> Frame | None:
        """The next message, which begins within so many seconds; None where the connection was closed before. Raises
        BadFrame, Disconnected, TimeoutError and OSError."""
        async with asyncio.timeout(seconds):
            first = await self._read_some(PREFIX.size)
        if not first:
            return None
        async with asyncio.timeout(FRAME_SECONDS):
            prefix = first + await self._read_all(PREFIX.size - len(first))
            return decode_frame(await self._read_all(body_length(prefix)))

    async def write(self, frame: bytes) -> None:
        """Sends what `encode_frame` made. Raises Disconnected, TimeoutError and OSError."""
        left = memoryview(frame)
        async with asyncio.timeout(FRAME_SECONDS):
            while left:
                rest = left
                left = left[await self._retried(lambda: self._sock.send(rest), writes=True) :]  # noqa: B023

    async def _read_all(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            parts.append(await self._read_some(size))
            if not parts[-1]:
                raise Disconnected("in the middle of a frame")
            size -= len(parts[-1])
        return b"".join(parts)

    async def _read_some(self, size: int) -> bytes:
        return await self._retried(lambda: self._sock.recv(size), writes=False)

    async def _retried(self, step: Callable[[], Made], *, writes: bool) -> Made:
        """`step` as soon as the socket is ready for it. `writes`: what a plain socket that would block waits for."""
        loop, file = asyncio.get_running_loop(), self._sock.fileno()
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                add, remove = loop.add_reader, loop.remove_reader
            except ssl.SSLWantWriteError:
                add, remove = loop.add_writer, loop.remove_writer
            except BlockingIOError:
                add, remove = (loop.add_writer, loop.remove_writer) if writes else (loop.add_reader, loop.remove_reader)
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError) as error:
                raise Disconnected(str(error)) from None
            ready = asyncio.Event()
            add(file, ready.set)
            try:
                await ready.wait()
            finally:
                remove(file)

    @contextlib.contextmanager
    def cancelling(self, task: asyncio.Future[None]) -> Iterator[None]:
        """While this side sends and the other has nothing to say: cancels `task` as soon as it says something, or
        closes the connection."""
        loop, file = asyncio.get_running_loop(), self._sock.fileno()

        def heard() -> None:
            loop.remove_reader(file)
            task.cancel()

        loop.add_reader(file, heard)
        try:
            yield
        finally:
            loop.remove_reader(file)

    def is_idle(self) -> bool:
        """Whether the other side has said nothing and closed nothing since the last frame that was read."""
        try:
            self._sock.setblocking(False)
            # Past TLS: a record of any kind would be an answer that nobody asked for.
            socket.socket.recv(self._sock, 1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    # ---- payloads, on a thread

    async def in_thread(self, work: Callable[[], Made]) -> Made:
        """Runs `work`, which moves payloads, on a thread. Returns or raises only when that is through, so that its
        memory may be given to others: a cancel shuts the connection down, upon which it ends at once."""
        future = asyncio.wrap_future(self._threads.submit(work))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self.shut_down()
            future.add_done_callback(lambda done: done.exception())  # looked at: nobody else does
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            raise

    def send_payloads(self, frame: bytes, payloads: Sequence[bytes | bytearray | memoryview], until: float) -> None:
        """Blocks until all is with the system: `frame`, then the payloads behind each other. Raises Disconnected, and
        TimeoutError at `until` (of time.monotonic) or where nothing moves."""
        left = [memoryview(each).cast("B") for each in (frame, *payloads)]
        self._move(left, self._send_once, until)

    def receive_payloads(self, payloads: Sequence[memoryview], until: float) -> None:
        """Blocks until all of them are filled, one behind the other. Raises as `send_payloads`."""
        try:
            self._move(list(payloads), self._receive_once, until)
        finally:
            self._wait_for(1)

    def _move(self, left: list[memoryview], once: Callable[[list[memoryview]], int], until: float) -> None:
        self._sock.settimeout(STALL_SECONDS)
        try:
            while left:
                if time.monotonic() > until:
                    raise TimeoutError("too slow")
                moved = once(left)
                if not moved:
                    raise Disconnected("in the middle of a payload")
                _advance(left, moved)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError) as error:
            raise Disconnected(str(error)) from None
        finally:
            self._sock.setblocking(False)

    def _send_once(self, left: list[memoryview]) -> int:
        if isinstance(self._sock, ssl.SSLSocket):
            return self._sock.send(left[0])
        return self._sock.sendmsg(left[:MAX_BUFFERS])

    def _receive_once(self, left: list[memoryview]) -> int:
        if isinstance(self._sock, ssl.SSLSocket):
            return self._sock.recv_into(left[0])
        self._wait_for(min(LOW_WATER, sum(map(len, left))))
        return self._sock.recvmsg_into(left[:MAX_BUFFERS])[0]

    def _wait_for(self, count: int) -> None:
        """From now on the socket counts as readable once so many bytes are there, or the other side has closed it."""
        if count != self._low_water:
            self._low_water = count
            with contextlib.suppress(OSError):  # some systems know no such option: then it is as it was
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    # ---- the end

    def shut_down(self) -> None:
        """Ends what is being sent and received, on whatever thread. Safe to call again."""
        with contextlib.suppress(OSError):
            # Not SSLSocket's own, which would make the thread read on without TLS.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection, on which nothing is being moved. Safe to call again."""
        self._sock.close()


def _advance(left: list[memoryview], moved: int) -> None:
    """Takes so many bytes off the front."""
    whole = 0
    while whole < len(left) and moved >= len(left[whole]):
        moved -= len(left[whole])
        whole += 1
    del left[:whole]
    if moved:
        left[0] = left[0][moved:]
