"""Clients that connect all at once, on the event loop that serves them."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from services.gateway.http import server as acceptor
from services.gateway.http.server import MAX_ACCEPTS, Acceptor
from tests.support.gateway.fake_services import eventually

CLIENTS = 3 * MAX_ACCEPTS


class Scarce(socket.socket):
    """Has no file descriptor for the first client."""

    tried = 0

    def accept(self) -> Any:
        self.tried += 1
        if self.tried == 1:
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


class Turns:
    """Counts the turns of the running loop, and keeps in which one each client came."""

    def __init__(self) -> None:
        self.now = 0
        self.came: list[int] = []
        self._transports: list[asyncio.BaseTransport] = []
        self._count()

    def _count(self) -> None:
        self.now += 1
        self._next = asyncio.get_running_loop().call_soon(self._count)

    def protocol(self) -> asyncio.Protocol:
        turns = self

        class Client(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                turns.came.append(turns.now)
                turns._transports.append(transport)

        return Client()

    def close(self) -> None:
        self._next.cancel()
        for transport in self._transports:
            transport.close()


def listening(kind: type[socket.socket] = socket.socket) -> socket.socket:
    listener = kind(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(CLIENTS)
    return listener


@pytest.fixture
def connect() -> Iterator[Callable[[socket.socket, int], None]]:
    clients: list[socket.socket] = []

    def connect(listener: socket.socket, count: int) -> None:
        clients.extend(socket.create_connection(listener.getsockname()) for _ in range(count))

    yield connect
    for client in clients:
        client.close()


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_clients_that_connect_at_once_are_taken_in_within_a_few_turns_of_the_loop(
    factory: Callable[[], asyncio.AbstractEventLoop], connect: Callable[[socket.socket, int], None]
) -> None:
    async def all_came() -> list[int]:
        listener, turns = listening(), Turns()
        connect(listener, CLIENTS)
        taking = Acceptor(listener, turns.protocol)
        await eventually(lambda: len(turns.came) == CLIENTS)
        taking.close()
        turns.close()
        await asyncio.sleep(0)
        return turns.came

    with asyncio.Runner(loop_factory=factory) as runner:
        came = runner.run(all_came())
    assert came[-1] - came[0] <= CLIENTS // MAX_ACCEPTS + 1


async def test_without_file_descriptors_clients_wait_until_there_are_some(
    monkeypatch: pytest.MonkeyPatch, connect: Callable[[socket.socket, int], None]
) -> None:
    monkeypatch.setattr(acceptor, "RETRY_SECONDS", 0.01)
    listener, turns = listening(Scarce), Turns()
    connect(listener, 2)
    taking = Acceptor(listener, turns.protocol)
    await eventually(lambda: len(turns.came) == 2)
    assert isinstance(listener, Scarce)
    assert listener.tried >= 3
    taking.close()
    turns.close()


async def test_who_closes_while_it_waits_takes_no_more(connect: Callable[[socket.socket, int], None]) -> None:
    listener, turns = listening(Scarce), Turns()
    connect(listener, 1)
    taking = Acceptor(listener, turns.protocol)
    assert isinstance(listener, Scarce)
    await eventually(lambda: listener.tried == 1)
    taking.close()
    await asyncio.sleep(0)
    assert turns.came == []
    turns.close()
