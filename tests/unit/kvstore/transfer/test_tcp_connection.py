"""Payloads over a real TCP connection: all bytes come however they are cut, and what follows them is read at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from kvstore.transfer.frames import FetchEnd, encode_frame
from kvstore.transfer.tcp_connection import LOW_WATER, Disconnected, TcpConnection

SIZES = (1, LOW_WATER - 1, LOW_WATER, LOW_WATER + 1, 3 * LOW_WATER + 5)


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[socket.socket, TcpConnection]]:
    """A plain sender and a connection that receives."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as receives,
    ):
        sends, _ = listening.accept()
        with sends, ThreadPoolExecutor(1) as threads:
            yield sends, TcpConnection(receives, threads)


async def receive(connection: TcpConnection, views: list[memoryview]) -> None:
    await connection.in_thread(lambda: connection.receive_payloads(views, time.monotonic() + 60))


@pytest.mark.parametrize("pieces", [1, 40])
async def test_payloads_of_any_size_come_whole_and_frames_behind_them_at_once(pieces: int) -> None:
    data = [Random(size).randbytes(size) for size in SIZES]
    stream = b"".join(data)
    async with connected() as (sends, connection):

        def send() -> None:
            step = -(-len(stream) // pieces)
            for start in range(0, len(stream), step):
                sends.sendall(stream[start : start + step])
                time.sleep(0.001)

        for _ in range(2):
            views = [memoryview(bytearray(size)) for size in SIZES]
            sending = asyncio.create_task(asyncio.to_thread(send))
            await receive(connection, views)
            await sending
            assert [bytes(view) for view in views] == data
            sends.sendall(encode_frame(FetchEnd()))
            assert await connection.read_frame(60) == FetchEnd()


async def test_a_sender_that_closes_the_connection_ends_a_payload_at_once() -> None:
    """Else it would be a TimeoutError."""
    async with connected() as (sends, connection):
        sends.sendall(bytes(100))
        sends.close()
        with pytest.raises(Disconnected, match="in the middle of a payload"):
            await receive(connection, [memoryview(bytearray(2 * LOW_WATER))])
