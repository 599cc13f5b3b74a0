"""How long a first connection may take."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator

import pytest

from shared.bus import BusError
from shared.bus.nats_connection import NatsOptions, _in_time, connect

INFO = b'INFO {"server_id":"s","version":"2.10.0","proto":1,"port":1,"max_payload":1048576,"headers":true}\r\n'


async def test_a_client_that_takes_a_cancellation_for_another_s_is_given_up_nevertheless() -> None:
    taken = 0

    async def connect() -> None:
        nonlocal taken
        while taken < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                taken += 1
        await asyncio.Event().wait()

    async with asyncio.timeout(60):
        with pytest.raises(TimeoutError):
            await _in_time(connect(), 0.01)
    assert taken == 2


async def test_what_a_client_raises_is_raised() -> None:
    async def connect() -> None:
        await asyncio.sleep(0)
        raise ConnectionRefusedError("nobody there")

    with pytest.raises(ConnectionRefusedError, match="nobody there"):
        await _in_time(connect(), 60)


async def test_only_a_client_that_is_refused_is_given_up_early() -> None:
    connected = asyncio.Event()

    async def connect() -> None:
        await connected.wait()

    async with asyncio.timeout(60):
        with pytest.raises(TimeoutError):
            await _in_time(connect(), 3600, 0.01, lambda: True)
        slow = asyncio.create_task(_in_time(connect(), 3600, 0.01, lambda: False))
        await asyncio.sleep(0.1)
        connected.set()
        await slow


async def test_what_goes_wrong_at_every_attempt_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """It filled a supervisor's log with some ten lines a second."""
    nobody = NatsOptions(servers=("nats://127.0.0.1:1",), connect_timeout=1.0)
    with pytest.raises(BusError, match="Connect call failed"):
        await connect(nobody)
    assert [record.message for record in caplog.records] == ["bus error", "bus away"]


@contextlib.asynccontextmanager
async def server_that_takes_over_users(closes: int) -> AsyncIterator[tuple[str, list[int]]]:
    """Lets every client in, and closes the first `closes` connections right behind that; its URL, and a count of its
    connections."""
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(len(connections))
        refuses = len(connections) <= closes
        writer.write(INFO)
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                if line == b"PING\r\n":
                    writer.write(b"PONG\r\n" + (b"-ERR 'Authorization Violation'\r\n" if refuses else b""))
                    if refuses:
                        break
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections


async def test_a_server_that_takes_over_users_just_now_is_tried_again() -> None:
    """As a supervisor does that takes over a stack, whose server is about to read its new configuration."""
    async with server_that_takes_over_users(closes=2) as (url, connections), asyncio.timeout(60):
        bus = await connect(NatsOptions(servers=(url,)))
        await bus.flush()
        assert len(connections) == 3
        await bus.close()


async def test_one_that_goes_on_closing_connections_is_given_up_with_its_reason() -> None:
    async with server_that_takes_over_users(closes=10**6) as (url, _), asyncio.timeout(60):
        with pytest.raises(BusError, match="authorization failed"):
            await connect(NatsOptions(servers=(url,), connect_timeout=0.3))


async def test_attempts_that_are_not_answered_leave_no_connection() -> None:
    """They were left to the collection of garbage, with a warning of Python's."""
    silent = asyncio.Semaphore(0)  # connections that got no answer and were closed by the client

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        came += 1
        with contextlib.suppress(ConnectionError):
            if came == 2:
                assert await reader.read() == b""
                silent.release()
            else:
                writer.write(INFO)
                while await reader.readline() != b"PING\r\n":
                    pass
                writer.write(b"PONG\r\n")
                await (closing.wait() if came == 1 else reader.read())
        writer.close()

    came, closing = 0, asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    gc.disable()
    try:
        async with server, asyncio.timeout(60):
            bus = await connect(NatsOptions(servers=(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}",)))
            closing.set()
            await silent.acquire()
            await bus.close()
    finally:
        gc.enable()
