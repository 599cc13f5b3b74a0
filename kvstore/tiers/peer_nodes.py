"""The stores of other nodes: serves blocks to them, fetches blocks from them, and knows their addresses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping

from kvstore import metrics
from kvstore.arena.in_flight_block import BlockShape, InFlightBlock
from kvstore.transfer.interface import BlockDestination, BlockLender, BlockRequest, BlockTransport, PeerUnreachable
from kvstore.transfer.link_rates import LinkRate
from shared.addresses import host_and_port
from shared.ids import NodeId
from shared.messages.kvstore import LinkReport, TransferEndpoint
from shared.messages.lifecycle import Lifecycle, StoreReport

GRPC = "grpc"
"""The transport whose address every release says, in `StoreReport.transfer`."""


class PeerNodes:
    """Owns the transports, and the addresses of the other nodes' stores. `kvstore.tiers.interface.PeerStores`."""

    def __init__(self, transports: Mapping[str, BlockTransport]) -> None:
        """`transports`: by name, the one that is preferred first."""
        self._transports = dict(transports)
        self._stores: dict[NodeId, Lifecycle] = {}
        self.address = ""
        self.endpoints: tuple[TransferEndpoint, ...] = ()

    async def listen(self, lender: BlockLender, host: str, ports: Mapping[str, int], known_as: str) -> None:
        """Lets other nodes fetch blocks by every transport, at `known_as` as the host. Raises CannotListen."""
        for name, transport in self._transports.items():
            address = host_and_port(known_as, await transport.listen(lender, host, ports[name]))
            self.endpoints += (TransferEndpoint(name, address),)
            if name == GRPC:
                self.address = address

    async def run(self) -> None:
        """Until cancelled; then closes the connections and stops serving."""
        async with asyncio.TaskGroup() as tasks:
            for transport in self._transports.values():
                tasks.create_task(transport.run())

    def record_lifecycle(self, lifecycle: Lifecycle) -> None:
        """Remembers where another node's store can be fetched from, if the message says so."""
        store = lifecycle.store
        if store is not None and (store.transfer or store.endpoints) and lifecycle.phase in ("ready", "draining"):
            self._stores[store.node] = lifecycle

    def gone(self, last: Lifecycle) -> None:
        """Forgets the store that sent this last message, unless it has restarted meanwhile."""
        if last.store is not None and last.store.node in self._stores:
            known = self._stores[last.store.node]
            if (known.instance, known.incarnation) == (last.instance, last.incarnation):
                del self._stores[last.store.node]

    def routes_to(self, node: NodeId) -> Iterator[tuple[BlockTransport, str]]:
        """The transports that both stores have, with the address of the store of `node`, the preferred one first."""
        known = self._stores.get(node)
        if known is None or known.store is None:
            return
        addresses = _addresses(known.store)
        for name, transport in self._transports.items():
            if name in addresses:
                yield transport, addresses[name]

    def link(self, source: NodeId) -> LinkRate | None:
        """How fast blocks come from the store of that node; None where that was not measured of late."""
        rates = (transport.rate(address) for transport, address in self.routes_to(source))
        return next((rate for rate in rates if rate is not None), None)

    def links(self) -> tuple[LinkReport, ...]:
        """Those that are known, for the store's lifecycle."""
        known = ((node, self.link(node)) for node in self._stores)
        return tuple(
            LinkReport(source=node, bytes_per_second=rate.bytes_per_second, latency=rate.latency)
            for node, rate in known
            if rate is not None
        )

    async def fetch(
        self, source: NodeId, request: BlockRequest, shape: BlockShape, room: BlockDestination
    ) -> AsyncGenerator[InFlightBlock, None]:
        """Yields blocks from another node's store, by the first transport that reaches it; see `PeerStores.fetch`."""
        why = "unknown"
        for transport, address in self.routes_to(source):
            try:
                async with contextlib.aclosing(transport.fetch(address, request, shape, room)) as blocks:
                    async for block in blocks:
                        yield block
                return
            except PeerUnreachable:
                why = "unavailable"
        metrics.TIER_FAILED.labels("peer", why).inc()


def _addresses(store: StoreReport) -> dict[str, str]:
    """By transport."""
    addresses = {each.transport: each.address for each in store.endpoints}
    if store.transfer:
        addresses.setdefault(GRPC, store.transfer)
    return addresses
