"""Sends this store's blocks over TCP to the stores of other nodes, which fetch them."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvstore.arena.in_flight_block import InFlightBlock
from kvstore.transfer import lending as lending_module
from kvstore.transfer.frames import (
    MAX_GROUP_BLOCKS,
    BadFrame,
    BlockHead,
    BlocksFollow,
    FetchBlocks,
    FetchEnd,
    encode_frame,
)
from kvstore.transfer.interface import CannotListen
from kvstore.transfer.lending import MAX_FOLLOWING, MAX_SENDING, BlockLending, FetchRefused
from kvstore.transfer.tcp_connection import Disconnected, TcpConnection
from kvstore.transfer.tls import TransferTls
from shared.addresses import host_and_port

log = logging.getLogger(__name__)

TRANSPORT = "tcp"
GROUP_BYTES = 4 * 2**20
"""Payloads that are handed to a thread at a time, unless one block has more."""
MAX_CONNECTIONS = 256
"""From other nodes; a further one is closed at once."""
HANDSHAKE_SECONDS = 5.0
IDLE_SECONDS = 60.0
"""A connection without a request is closed; whoever kept it connects again."""
BACKLOG = 128


class TcpServer:
    """Owns the listening socket and the connections that others made."""

    def __init__(self, tls: TransferTls | None) -> None:
        """Raises TlsUnusable."""
        self._context = None if tls is None else tls.server_context()
        self._lending: BlockLending | None = None
        self._listening: socket.socket | None = None
        self._threads = ThreadPoolExecutor(MAX_SENDING + MAX_FOLLOWING, "transfer-send")
        self.connections = 0

    def listen(self, lending: BlockLending, host: str, port: int) -> int:
        """Listens, and returns the port; 0 lets the system choose one. Others are served once `run` runs. Raises
        CannotListen."""
        try:
            [(family, _, _, _, address), *_] = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            both = family == socket.AF_INET6 and host in ("", "::") and socket.has_dualstack_ipv6()
            self._listening = socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            raise CannotListen(f"cannot listen on {host_and_port(host, port)}: {error}") from None
        self._listening.setblocking(False)
        self._lending = lending
        return int(self._listening.getsockname()[1])

    async def run(self) -> None:
        """Serves until cancelled; then closes what is open."""
        listening = self._listening
        if listening is None:
            return
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    sock = await _accepted(loop, listening)
                    if self.connections >= MAX_CONNECTIONS:
                        sock.close()
                        continue
                    self.connections += 1
                    tasks.create_task(self._serve(TcpConnection(sock, self._threads), _name_of(sock)))
        finally:
            listening.close()
            self._threads.shutdown(wait=False)

    async def _serve(self, connection: TcpConnection, other: str) -> None:
        """One connection, to its end. What is wrong with it concerns no other."""
        try:
            if self._context is not None:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    await connection.secure(self._context, None)
            while await self._serve_one(connection):
                pass
        except BadFrame as error:
            log.warning("transfer connection closed: bad frame", extra={"peer": other, "error": str(error)})
        except ssl.SSLError as error:
            log.warning("transfer connection closed: TLS", extra={"peer": other, "error": str(error)})
        except (Disconnected, TimeoutError, OSError) as error:
            log.debug("transfer connection closed", extra={"peer": other, "error": str(error)})
        finally:
            self.connections -= 1
            connection.close()

    async def _serve_one(self, connection: TcpConnection) -> bool:
        """Whether another request may come on this connection."""
        request = await connection.read_frame(IDLE_SECONDS)
        if request is None:
            return False
        if not isinstance(request, FetchBlocks):
            raise BadFrame(f"{type(request).__name__} where FetchBlocks belongs")
        try:
            await self._send_while_listened_to(request, connection)
            end = FetchEnd()
        except FetchRefused as refused:
            end = FetchEnd(refused=refused.reason)
        await connection.write(encode_frame(end))
        return True

    async def _send_while_listened_to(self, request: FetchBlocks, connection: TcpConnection) -> None:
        """Raises FetchRefused; Disconnected where the other side went away meanwhile."""
        names, lending = request.names(), self._lending
        assert lending is not None

        async def send(blocks: Sequence[InFlightBlock], waited: bool) -> None:
            until = time.monotonic() + lending_module.MAX_FETCH_SECONDS
            for at in range(0, len(blocks), MAX_GROUP_BLOCKS):
                some = blocks[at : at + MAX_GROUP_BLOCKS]
                frame, payloads = encode_frame(_heads(some, waited and not at)), [block.payload for block in some]
                await connection.in_thread(lambda: connection.send_payloads(frame, payloads, until))  # noqa: B023

        serving = asyncio.ensure_future(
            lending.serve(request.layout, names, request.patience, send, transport=TRANSPORT, group_bytes=GROUP_BYTES)
        )
        try:
            with connection.cancelling(serving):
                await asyncio.wait([serving])
        finally:
            await _ended(serving)
        if serving.cancelled():
            raise Disconnected("while blocks were sent")
        serving.result()


async def _ended(serving: asyncio.Future[None]) -> None:
    """Cancels what is not done, and waits until it is: threads read the memory of what is lent."""
    while not serving.done():
        serving.cancel()
        try:
            await asyncio.wait([serving])
        except asyncio.CancelledError:
            continue


async def _accepted(loop: asyncio.AbstractEventLoop, listening: socket.socket) -> socket.socket:
    """The next connection. Where the system has no more files, a moment later."""
    while True:
        try:
            sock, _ = await loop.sock_accept(listening)
        except OSError as error:
            log.warning("cannot accept a transfer connection", extra={"error": str(error)})
            await asyncio.sleep(1.0)
            continue
        return sock


def _heads(blocks: Sequence[InFlightBlock], waited: bool) -> BlocksFollow:
    heads = tuple(BlockHead(block.hash, bytes(block.parent), block.tokens, block.checksums) for block in blocks)
    return BlocksFollow(blocks=heads, payload_bytes=len(blocks[0].payload), waited=waited)


def _name_of(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "?"
    return host_and_port(str(host), int(port))
