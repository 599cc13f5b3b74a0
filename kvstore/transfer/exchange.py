"""This store among those of other nodes: sends to them, pulls from them, and knows where they are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from kvstore.carried import CarriedBlock, Shape
from kvstore.tiers import Lender
from kvstore.transfer.client import TransferClient
from kvstore.transfer.rpc import host_and_port
from kvstore.transfer.server import TransferServer
from kvstore.transfer.tls import TransferTls
from shared.blocks import BlockHash
from shared.ids import NodeId
from shared.messages.lifecycle import Lifecycle


class Exchange:
    """Owns the server, the client, and the addresses of the other nodes' stores. `kvstore.tiers.Neighbours`."""

    def __init__(self, tls: TransferTls | None) -> None:
        self._tls = tls
        self._client = TransferClient(self.address_of, tls)
        self._server: TransferServer | None = None
        self._stores: dict[NodeId, Lifecycle] = {}
        self.address = ""

    async def listen(self, lender: Lender, host: str, port: int, known_as: str) -> None:
        """Lets others fetch from now on, and know the place by `known_as`. Raises CannotListen."""
        self._server = TransferServer(lender, self._tls)
        self.address = host_and_port(known_as, await self._server.start(host, port))

    async def run(self) -> None:
        try:
            await self._client.run()
        finally:
            if self._server is not None:
                await self._server.stop()

    def heard(self, lifecycle: Lifecycle) -> None:
        store = lifecycle.store
        if store is not None and store.transfer and lifecycle.phase in ("ready", "draining"):
            self._stores[store.node] = lifecycle

    def gone(self, last: Lifecycle) -> None:
        if last.store is not None and last.store.node in self._stores:
            known = self._stores[last.store.node]
            if (known.instance, known.incarnation) == (last.instance, last.incarnation):
                del self._stores[last.store.node]

    def address_of(self, node: NodeId) -> str | None:
        known = self._stores.get(node)
        return None if known is None or known.store is None else known.store.transfer

    def fetch(
        self, source: NodeId, layout: str, hashes: Sequence[BlockHash], shape: Shape
    ) -> AsyncGenerator[CarriedBlock, None]:
        return self._client.fetch(source, layout, hashes, shape)
