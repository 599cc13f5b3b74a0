"""Blocks over gRPC streams: the transport that every store speaks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from kvstore.arena.in_flight_block import BlockShape, InFlightBlock
from kvstore.transfer.client import TransferClient
from kvstore.transfer.interface import BlockDestination, BlockLender, BlockRequest
from kvstore.transfer.lending import BlockLending
from kvstore.transfer.link_rates import LinkRate
from kvstore.transfer.server import TransferServer
from kvstore.transfer.tls import TransferTls


class GrpcTransport:
    """Owns one store's gRPC server and its connections to others. `kvstore.transfer.interface.BlockTransport`."""

    def __init__(self, tls: TransferTls | None) -> None:
        self._tls = tls
        self._client = TransferClient(tls)
        self._server: TransferServer | None = None

    async def listen(self, lender: BlockLender, host: str, port: int) -> int:
        """Lets other nodes fetch blocks; see `BlockTransport.listen`."""
        self._server = TransferServer(BlockLending(lender), self._tls)
        return await self._server.start(host, port)

    async def run(self) -> None:
        """Until cancelled; then closes the connections and stops serving."""
        try:
            await self._client.run()
        finally:
            if self._server is not None:
                await self._server.stop()

    def fetch(
        self, address: str, request: BlockRequest, shape: BlockShape, room: BlockDestination
    ) -> AsyncGenerator[InFlightBlock, None]:
        """Yields blocks from another node's store; see `BlockTransport.fetch`. They come in memory of gRPC's, so that
        `room` is not used."""
        return self._client.fetch(address, request, shape)

    def rate(self, address: str) -> LinkRate | None:
        """How fast blocks came from that store of late; see `BlockTransport.rate`."""
        return self._client.rates.rate(address, time.monotonic())
