"""Blocks over plain TCP connections: the transport that costs least."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from kvstore.arena.in_flight_block import BlockShape, InFlightBlock
from kvstore.transfer.interface import BlockDestination, BlockLender, BlockRequest
from kvstore.transfer.lending import BlockLending
from kvstore.transfer.link_rates import LinkRate
from kvstore.transfer.tcp_client import TcpClient
from kvstore.transfer.tcp_server import TcpServer
from kvstore.transfer.tls import TransferTls


class TcpTransport:
    """Owns one store's listening socket and its connections to others. `kvstore.transfer.interface.BlockTransport`."""

    def __init__(self, tls: TransferTls | None) -> None:
        """Raises TlsUnusable."""
        self._client = TcpClient(tls)
        self._server = TcpServer(tls)

    async def listen(self, lender: BlockLender, host: str, port: int) -> int:
        """Lets other nodes fetch blocks; see `BlockTransport.listen`."""
        return self._server.listen(BlockLending(lender), host, port)

    async def run(self) -> None:
        """Until cancelled; then closes the connections and stops serving."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._server.run())
            tasks.create_task(self._client.run())

    def fetch(
        self, address: str, request: BlockRequest, shape: BlockShape, room: BlockDestination
    ) -> AsyncGenerator[InFlightBlock, None]:
        """Yields blocks from another node's store; see `BlockTransport.fetch`."""
        return self._client.fetch(address, request, shape, room)

    def rate(self, address: str) -> LinkRate | None:
        """How fast blocks came from that store of late; see `BlockTransport.rate`."""
        return self._client.rates.rate(address, time.monotonic())
