"""What carries blocks from the arena of one node to that of another. Stores know nothing else of the network.

There are two: TCP (`kvstore/transfer/tcp_transport.py`), and gRPC streams (`kvstore/transfer/grpc_transport.py`), which
every release speaks. The receiver pulls: it knows how much it has room for, and a sender need not know who waits for
what. A block that is still being computed is waited for, so that a prompt's blocks go over one by one while the rest of
it is computed.
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


class BlockName(NamedTuple):
    """A block that is about to come."""

    hash: BlockHash
    parent: BlockHash
    tokens: int


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


class BlockDestination(Protocol):
    """What a transport may use of the store that the blocks of one fetch come to: slots to receive into."""

    seconds: float
    """How long a slot may be written to; nothing is written to it after that, or after the fetch is closed."""

    def reserve(self, blocks: Sequence[BlockName]) -> Sequence[memoryview | None]:
        """Writable memory of the size of a payload for each; None for one that is here already, whose bytes are not
        needed. Shorter than `blocks` where there is no more room. Called on the store's event loop."""


class CannotListen(Exception):
    """The port is taken, or the address not this machine's."""


class PeerUnreachable(Exception):
    """No connection by this transport, at least for now; nothing was sent, so another one may be tried."""


class CorruptData(Exception):
    """The received data is not what was requested; the text says why."""


class BlockTransport(Protocol):
    """Both ends of the transfers of one store. Payloads are sent at the pace of the receiver, bounded in flight."""

    async def listen(self, lender: BlockLender, host: str, port: int) -> int:
        """Lets other nodes fetch blocks; returns the port (0 lets the system choose one). Raises CannotListen."""

    async def run(self) -> None:
        """Until cancelled; then closes the connections and stops serving."""

    def fetch(
        self, address: str, request: BlockRequest, shape: BlockShape, room: BlockDestination
    ) -> AsyncGenerator[InFlightBlock, None]:
        """Yields what the store at `address` ("host:port") sends of `request`, in order, each block verified by its
        checksums. A payload may be the very memory that `room` gave. What does not come is a miss that is counted here.
        The caller sets the deadline and closes the iterator: closing cancels, frees what is pinned over there, and
        returns when nothing of `room` is written to any more. Raises PeerUnreachable before the first block."""

    def rate(self, address: str) -> LinkRate | None:
        """How fast blocks come from the store at `address`, as measured within the last minute; None if they did not,
        or too few."""
