"""A TCP proxy before the stack's bus, whose connections can be made slow, silent, or cut, each or all.

Whose connection it is, it reads in what every NATS client says first: `CONNECT {..., "name": "engine-1", ...}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

HOST = "127.0.0.1"
CHUNK = 64 * 1024
MAX_CHUNKS_QUEUED = 64
"""Of a direction of a connection; above it the sender's own socket fills."""
EVERYBODY = "bus"
"""The name of all connections together."""
CLOSE_TIMEOUT = 2.0
_NAME = re.compile(rb'"name":\s*"([^"]*)"')


class Impairment(NamedTuple):
    """What is wrong with a connection."""

    delay: float = 0.0
    """Seconds that everything takes longer, in each direction."""
    silent: bool = False
    """Nothing passes, and nobody is told."""
    cut: bool = False
    """It breaks, and a new one does, too."""


HEALTHY = Impairment()


class _Link:
    """Owns one client's connection and the one to the server that belongs to it."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.name = ""
        self._writers = client, server

    def sniff(self, data: bytes) -> None:
        """Finds the client's name in what it sends; nothing where it has been found."""
        if not self.name and (found := _NAME.search(data)):
            self.name = found[1].decode(errors="replace")

    def abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


class BusProxy:
    """Owns the listening socket, the connections, and what is wrong with them."""

    def __init__(self, server_port: Callable[[], int | None]) -> None:
        """`server_port`: where nats-server listens just now; None while there is none."""
        self._server_port = server_port
        self._impaired: dict[str, Impairment] = {}
        self._links: set[_Link] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._server: asyncio.Server

    async def start(self) -> int:
        """Listens; the port. Raises OSError."""
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Takes no more connections, and breaks those that there are."""
        self._server.close()
        for link in list(self._links):
            link.abort()
        if self._serving:
            await asyncio.wait(self._serving, timeout=CLOSE_TIMEOUT)
        await asyncio.sleep(0)  # aborted transports close their sockets in the next turn of the loop

    @contextlib.contextmanager
    def impaired(self, name: str, impairment: Impairment) -> Iterator[None]:
        """The connections of this name, or of EVERYBODY, are so while the context lasts."""
        self._impaired[name] = impairment
        self._tell()
        try:
            yield
        finally:
            del self._impaired[name]
            self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for link in list(self._links):
            if self._of(link).cut:
                link.abort()

    def _of(self, link: _Link) -> Impairment:
        return self._impaired.get(EVERYBODY) or self._impaired.get(link.name, HEALTHY)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = self._server_port()
        if port is None or self._impaired.get(EVERYBODY, HEALTHY).cut:
            writer.transport.abort()
            return
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(HOST, port)
            link = _Link(writer, far_writer)
            self._links.add(link)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._direction(link, reader, far_writer, sniff=True))
                    tasks.create_task(self._direction(link, far_reader, writer, sniff=False))
            except* OSError:
                pass
            finally:
                self._links.discard(link)
                link.abort()
            return
        writer.transport.abort()

    async def _direction(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, sniff: bool
    ) -> None:
        """Raises ConnectionError at the end of the connection, so that the other direction ends, too."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS_QUEUED)
        clock = asyncio.get_running_loop().time

        async def pass_on() -> None:
            while True:
                arrived, data = await queue.get()
                while self._of(link).silent:
                    await self._changed.wait()
                if (late := arrived + self._of(link).delay - clock()) > 0:
                    await asyncio.sleep(late)
                writer.write(data)
                with contextlib.suppress(ConnectionError):  # the other direction ends of it, and both with it
                    await writer.drain()

        passing = asyncio.create_task(pass_on())
        try:
            while data := await reader.read(CHUNK):
                if sniff:
                    link.sniff(data)
                    if self._of(link).cut:
                        break
                await queue.put((clock(), data))
        finally:
            passing.cancel()
        raise ConnectionError("closed")
