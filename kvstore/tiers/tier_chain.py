"""The lower tiers of a store in the order in which they are searched, as the one place that evicted blocks go to."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.arena.in_flight_block import InFlightBlock
from kvstore.tiers.interface import LowerTier
from shared.blocks import BlockHash


class TierChain:
    """Every tier is offered every block, so that none need be read to fill the next: the local disk survives a
    restart, and Redis is there for other nodes. Implements `kvstore.tiers.interface.EvictionTarget`."""

    def __init__(self, tiers: Sequence[LowerTier]) -> None:
        self.tiers = tuple(tiers)

    def offer(self, layout: str, block: InFlightBlock) -> bool:
        """Whether any tier took the block."""
        taken = [tier.offer(layout, block) for tier in self.tiers]
        return any(taken)

    def has(self, layout: str, name: BlockHash) -> bool:
        """Whether any tier has the block. One that was away gets another chance when the block is evicted."""
        return any(tier.has(layout, name) for tier in self.tiers)
