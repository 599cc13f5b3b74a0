"""The proxy before the bus: what passes, and what does not while a connection is slow, silent or cut."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from deploy.chaos.proxy import EVERYBODY, HOST, BusProxy, Impairment

DEADLINE = 60.0
HELLO = b'CONNECT {"verbose": false, "name": "%s"}\r\n'


class EchoClient:
    """Says its name as a NATS client does, and reads back what it says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def echo(self, line: bytes) -> bytes:
        """Empty once the connection is closed."""
        self.writer.write(line + b"\n")
        async with asyncio.timeout(DEADLINE):
            with contextlib.suppress(ConnectionError):
                return (await self.reader.readline()).strip()
        return b""


@pytest.fixture
async def proxy() -> AsyncIterator[BusProxy]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                writer.write(line)
        writer.close()

    server = await asyncio.start_server(echo, HOST, 0)
    proxy = BusProxy(lambda: server.sockets[0].getsockname()[1])
    yield proxy
    await proxy.close()
    server.close()
    await asyncio.sleep(0.01)  # for the server's ends of what was broken


@contextlib.asynccontextmanager
async def client(port: int, name: str) -> AsyncIterator[EchoClient]:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        echoing = EchoClient(reader, writer)
        writer.write(HELLO % name.encode())
        with contextlib.suppress(ConnectionError):
            await reader.readline()
        yield echoing
    finally:
        writer.transport.abort()


async def test_only_the_named_connection_is_silent_and_what_was_said_arrives_later(proxy: BusProxy) -> None:
    port = await proxy.start()
    async with client(port, "engine-1") as one, client(port, "engine-2") as two:
        with proxy.impaired("engine-1", Impairment(silent=True)):
            waiting = asyncio.create_task(one.echo(b"a"))
            assert await two.echo(b"b") == b"b"
            assert not waiting.done()
        assert await waiting == b"a"


async def test_a_slow_connection_takes_its_time_in_each_direction(proxy: BusProxy) -> None:
    port = await proxy.start()
    async with client(port, "engine-1") as one:
        with proxy.impaired(EVERYBODY, Impairment(delay=0.1)):
            begun = time.monotonic()
            assert await one.echo(b"a") == b"a"
            assert time.monotonic() - begun >= 0.2


async def test_a_cut_connection_breaks_and_so_does_a_new_one_until_it_is_healed(proxy: BusProxy) -> None:
    port = await proxy.start()
    async with client(port, "engine-1") as one, client(port, "engine-2") as two:
        with proxy.impaired("engine-1", Impairment(cut=True)):
            assert await one.echo(b"a") == b""
            async with client(port, "engine-1") as again:
                assert await again.echo(b"a") == b""
            assert await two.echo(b"b") == b"b"
        with proxy.impaired(EVERYBODY, Impairment(cut=True)):
            assert await two.echo(b"b") == b""
        async with client(port, "engine-1") as healed:
            assert await healed.echo(b"a") == b"a"


async def test_without_a_server_connections_end() -> None:
    proxy = BusProxy(lambda: None)
    async with client(await proxy.start(), "engine-1") as one:
        assert await one.echo(b"a") == b""
    await proxy.close()
