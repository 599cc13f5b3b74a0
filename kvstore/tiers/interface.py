"""What the store requires of lower tiers. Any of them may be slow, full or dead: the store works without them.

Tiers are offered blocks that leave the arena, and searched for blocks that are not in it. What they cannot do is a miss
that they count themselves; an exception that comes out of one is a bug.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from kvstore.arena.in_flight_block import BlockShape, InFlightBlock
from shared.blocks import BlockHash
from shared.ids import NodeId
from shared.messages.lifecycle import Lifecycle


class LowerTier(Protocol):
    """Where blocks go that the arena has no more room for."""

    async def run(self) -> None:
        """The tier's own work, from the store's start until cancelled; closes its connections then."""

    def offer(self, layout: str, block: InFlightBlock) -> bool:
        """Takes a copy of the block, to be stored in the background; False where the tier is away or has enough to do.
        Never waits. The slot that `block.payload` is a view of is written to as soon as this returns."""

    def has(self, layout: str, name: BlockHash) -> bool:
        """Whether the tier took the block not long ago and, as far as it knows, still has it."""

    def fetch(self, layout: str, hashes: Sequence[BlockHash], shape: BlockShape) -> AsyncGenerator[InFlightBlock, None]:
        """The leading run of `hashes` that is there, in order, each compared with its checksums. The store sets the
        deadline, and cancels."""


class PeerStores(Protocol):
    """The stores of other nodes."""

    address: str
    """Host and port where they fetch this store's blocks; empty where they cannot."""

    def record_lifecycle(self, lifecycle: Lifecycle) -> None:
        """Counts a lifecycle in; it may be that of a peer."""

    def gone(self, last: Lifecycle) -> None:
        """The instance of this lifecycle has ended or fallen silent."""

    async def run(self) -> None:
        """As `LowerTier.run`."""

    def fetch(
        self, source: NodeId, layout: str, hashes: Sequence[BlockHash], shape: BlockShape
    ) -> AsyncGenerator[InFlightBlock, None]:
        """As `LowerTier.fetch`, from the store of node `source`."""
