"""What the store requires of lower tiers. Any of them may be slow, full or dead: the store works without them.

Tiers are offered blocks that leave the arena, and searched for blocks that are not in it. What they cannot do is a miss
that they count themselves; an exception that comes out of one is a bug.

Packages that bring tiers of their own (docs/kv_tiers.md) import from here whatever they need.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from kvstore.arena.in_flight_block import BlockShape, InFlightBlock, pack_block, unpack_block
from kvstore.transfer.interface import BlockDestination, BlockRequest
from kvstore.transfer.link_rates import LinkRate
from shared.blocks import BlockHash
from shared.ids import NodeId
from shared.messages.kvstore import LinkReport, TransferEndpoint
from shared.messages.lifecycle import Lifecycle, TierReport

__all__ = [
    "BlockHash",
    "BlockShape",
    "EvictionTarget",
    "InFlightBlock",
    "LowerTier",
    "PeerStores",
    "TierReport",
    "pack_block",
    "unpack_block",
]


class EvictionTarget(Protocol):
    """Takes blocks that leave the arena: one tier, or several."""

    def offer(self, layout: str, block: InFlightBlock) -> bool:
        """Copies the block, to store it in the background. Returns False if the tier is away or busy. Never waits: the
        slot that `block.payload` views may be overwritten as soon as this returns."""

    def has(self, layout: str, name: BlockHash) -> bool:
        """Whether the tier took the block not long ago and, as far as it knows, still has it."""


class LowerTier(EvictionTarget, Protocol):
    """A slower store for blocks that have left the arena."""

    name: str
    """What metrics, logs and reports call it, such as "ssd"."""

    async def run(self) -> None:
        """Does the tier's background work from the store's start until cancelled, then closes its connections."""

    def fetch(self, layout: str, hashes: Sequence[BlockHash], shape: BlockShape) -> AsyncGenerator[InFlightBlock, None]:
        """Yields the leading run of `hashes` that the tier holds, in order, each block verified by its checksums. The
        store sets the deadline and cancels."""

    def report(self) -> TierReport:
        """What the tier holds and how it does, for the store's lifecycle."""


class PeerStores(Protocol):
    """The stores of other nodes."""

    address: str
    """Host and port where other nodes fetch this store's blocks over gRPC; empty if they cannot."""
    endpoints: tuple[TransferEndpoint, ...]
    """The same for every transport, gRPC included."""

    def record_lifecycle(self, lifecycle: Lifecycle) -> None:
        """Records a lifecycle message, which may be that of another node's store."""

    def gone(self, last: Lifecycle) -> None:
        """Forgets an instance that has ended or fallen silent; `last` is its last lifecycle."""

    async def run(self) -> None:
        """Runs in the background until cancelled; see `LowerTier.run`."""

    def fetch(
        self, source: NodeId, request: BlockRequest, shape: BlockShape, room: BlockDestination
    ) -> AsyncGenerator[InFlightBlock, None]:
        """Yields blocks from the store of node `source`; see `BlockTransport.fetch`. One that cannot be reached is a
        miss."""

    def link(self, source: NodeId) -> LinkRate | None:
        """How fast blocks come from the store of that node; None where that was not measured of late."""

    def links(self) -> tuple[LinkReport, ...]:
        """The same of all nodes where it is known, for the store's lifecycle."""
