"""The stores of other nodes: serves blocks to them, fetches blocks from them, and knows their addresses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from kvstore import metrics
from kvstore.arena.in_flight_block import BlockShape, InFlightBlock
from kvstore.transfer.interface import BlockLender, BlockRequest, BlockTransport
from kvstore.transfer.link_rates import LinkRate
from kvstore.transfer.rpc import host_and_port
from shared.ids import NodeId
from shared.messages.lifecycle import Lifecycle, LinkReport


class PeerNodes:
    """Owns the transport, and the addresses of the other nodes' stores. `kvstore.tiers.interface.PeerStores`."""

    def __init__(self, transport: BlockTransport) -> None:
        self._transport = transport
        self._stores: dict[NodeId, Lifecycle] = {}
        self.address = ""

    async def listen(self, lender: BlockLender, host: str, port: int, known_as: str) -> None:
        """Lets other nodes fetch blocks, at `known_as` as the host. Raises CannotListen."""
        self.address = host_and_port(known_as, await self._transport.listen(lender, host, port))

    async def run(self) -> None:
        """Until cancelled; then closes the connections and stops serving."""
        await self._transport.run()

    def record_lifecycle(self, lifecycle: Lifecycle) -> None:
        """Remembers where another node's store can be fetched from, if the message says so."""
        store = lifecycle.store
        if store is not None and store.transfer and lifecycle.phase in ("ready", "draining"):
            self._stores[store.node] = lifecycle

    def gone(self, last: Lifecycle) -> None:
        """Forgets the store that sent this last message, unless it has restarted meanwhile."""
        if last.store is not None and last.store.node in self._stores:
            known = self._stores[last.store.node]
            if (known.instance, known.incarnation) == (last.instance, last.incarnation):
                del self._stores[last.store.node]

    def address_of(self, node: NodeId) -> str | None:
        """Host and port of the store of `node`; None where none is known."""
        known = self._stores.get(node)
        return None if known is None or known.store is None else known.store.transfer

    def link(self, source: NodeId) -> LinkRate | None:
        """How fast blocks come from the store of that node; None where that was not measured of late."""
        address = self.address_of(source)
        return None if address is None else self._transport.rate(address)

    def links(self) -> tuple[LinkReport, ...]:
        """Those that are known, for the store's lifecycle."""
        known = ((node, self.link(node)) for node in self._stores)
        return tuple(
            LinkReport(source=node, bytes_per_second=rate.bytes_per_second, latency=rate.latency)
            for node, rate in known
            if rate is not None
        )

    async def fetch(
        self, source: NodeId, request: BlockRequest, shape: BlockShape
    ) -> AsyncGenerator[InFlightBlock, None]:
        """Yields blocks from another node's store; see `PeerStores.fetch`."""
        address = self.address_of(source)
        if address is None:
            metrics.TIER_FAILED.labels("peer", "unknown").inc()
            return
        async with contextlib.aclosing(self._transport.fetch(address, request, shape)) as blocks:
            async for block in blocks:
                yield block
