"""What carries blocks from the arena of one node to that of another. Stores know nothing else of the network.

gRPC streams (`kvstore/transfer/grpc_transport.py`) are the one that is there. The receiver pulls: it knows how much it
has room for, and a sender need not know who waits for what. A block that is still being computed is waited for, so that
a prompt's blocks go over one by one while the rest of it is computed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from kvstore.arena.in_flight_block import BlockShape, InFlightBlock
from kvstore.transfer.link_rates import LinkRate
from shared.blocks import BlockHash


class BlockRequest(NamedTuple):
    """Blocks that one store wants of another."""

    layout: str
    """Fingerprint of their layout."""
    hashes: Sequence[BlockHash]
    """In the order of the chain. What comes is the leading run of them that is there."""
    patience: float = 0.0
    """Seconds that the sender waits for each block that it has not got, as it is being computed; 0: a missing block is
    the end."""


class BlockLender(Protocol):
    """What a transport requires of the store whose blocks it sends."""

    def lend(self, layout: str, hashes: Sequence[BlockHash]) -> AbstractContextManager[Sequence[InFlightBlock]] | None:
        """The leading run of `hashes` in the arena, checked, and pinned until the context is left. None: no blocks of
        that layout are here. Called on the store's event loop; bound how long and how many."""

    async def copying(self, size: int) -> None:
        """Returns when so many bytes may be copied: what the host has for that is shared with all other copies."""

    async def committed(self, layout: str, name: BlockHash, seconds: float) -> bool:
        """Returns True as soon as that block is committed, from the call on; False if it is not in so many seconds, or
        if too many are waited for."""


class CannotListen(Exception):
    """The port is taken, or the address not this machine's."""


class BlockTransport(Protocol):
    """Both ends of the transfers of one store. Chunks are sent at the pace of the receiver, several in flight."""

    async def listen(self, lender: BlockLender, host: str, port: int) -> int:
        """Lets other nodes fetch blocks; returns the port (0 lets the system choose one). Raises CannotListen."""

    async def run(self) -> None:
        """Until cancelled; then closes the connections and stops serving."""

    def fetch(self, address: str, request: BlockRequest, shape: BlockShape) -> AsyncGenerator[InFlightBlock, None]:
        """Yields what the store at `address` ("host:port") sends of `request`, in order, each block verified by its
        checksums. What does not come is a miss that is counted here. The caller sets the deadline and closes the
        iterator: closing cancels, and frees what is pinned over there."""

    def rate(self, address: str) -> LinkRate | None:
        """How fast blocks come from the store at `address`, as measured within the last minute; None if they did not,
        or too few."""
