"""What lies below and beside the arena, as the store sees it. Any of it may be slow, full or dead: nothing stops.

Tiers are offered what leaves the arena, and asked for what is not there. Whatever they cannot do is a miss, and theirs
to count; an exception that comes out of one is a bug.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from kvstore.carried import CarriedBlock, Shape
from shared.blocks import BlockHash
from shared.ids import NodeId
from shared.messages.lifecycle import Lifecycle


class Tier(Protocol):
    """A place for blocks that the arena had no more room for."""

    async def run(self) -> None:
        """The tier's own work, from the store's start until cancelled; closes what is open then."""

    def offer(self, layout: str, block: CarriedBlock) -> bool:
        """Takes a copy along to be stored in the background; False where the tier is away or has enough to do. Never
        waits. The slot that `block.payload` is a view of is written to as soon as this returns."""

    def has(self, layout: str, name: BlockHash) -> bool:
        """Whether it took the block not long ago, as far as it knows: offering it again costs nothing."""

    def fetch(self, layout: str, hashes: Sequence[BlockHash], shape: Shape) -> AsyncGenerator[CarriedBlock, None]:
        """The leading run of `hashes` that is there, in order, each compared with its checksums. The store sets the
        deadline, and cancels."""


class Neighbours(Protocol):
    """The stores of other nodes."""

    address: str
    """Host and port where they fetch this store's blocks; empty where they cannot."""

    def heard(self, lifecycle: Lifecycle) -> None:
        """Somebody is there, perhaps one of them."""

    def gone(self, last: Lifecycle) -> None:
        """Somebody is there no more."""

    async def run(self) -> None:
        """As `Tier.run`."""

    def fetch(
        self, source: NodeId, layout: str, hashes: Sequence[BlockHash], shape: Shape
    ) -> AsyncGenerator[CarriedBlock, None]:
        """As `Tier.fetch`, from the store of node `source`."""


class Lender(Protocol):
    """The store, as seen by whoever sends its blocks to other nodes."""

    def lend(self, layout: str, hashes: Sequence[BlockHash]) -> AbstractContextManager[Sequence[CarriedBlock]] | None:
        """The leading run of `hashes` in the arena, checked, and pinned until the context is left. None: no blocks of
        that layout are here. Called on the store's event loop; bound how long and how many."""
