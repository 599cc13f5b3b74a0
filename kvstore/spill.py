"""Offers blocks to the tier below before they must make room: a little at a time, while nobody waits.

Without it whoever reserves slots in a full arena would wait until the blocks that were there are copied for the tier;
and of a long chain that goes at once only its end, which goes first, would find room on the way.
"""

from __future__ import annotations

import asyncio

from kvstore.core.room import Room
from kvstore.core.shelf import Block, Shelf
from kvstore.core.victims import next_victims
from kvstore.node_store import NodeStore
from kvstore.tiers import Tier
from shared.blocks import BLOCK_SIZE

AHEAD_BYTES = 256 * 2**20
AHEAD_SHARE = 0.25
"""What can be written without waiting for the tier, and its largest share of the budget."""
STEP_BYTES = 4 * 2**20
"""Copied at a time."""
BETWEEN_STEPS = 0.002
PAUSE_FIRST, PAUSE_LONGEST = 0.02, 0.32
"""Seconds until the next look where there was nothing to do."""


class SpillAhead:
    """Sees to it that the next blocks to be evicted are in the tier below already."""

    def __init__(self, store: NodeStore, tier: Tier) -> None:
        self._store = store
        self._tier = tier

    async def run(self) -> None:
        """Until cancelled."""
        pause = PAUSE_FIRST
        while True:
            copied = self.step()
            pause = PAUSE_FIRST if copied else min(2 * pause, PAUSE_LONGEST)
            await asyncio.sleep(BETWEEN_STEPS if copied >= STEP_BYTES else pause)

    def step(self) -> int:
        """Offers what lacks most; how many bytes that were."""
        room = self._store.core.room
        lacking, copied = _lacking(room), 0
        for shelf, block in next_victims(room.shelves.values()):
            if lacking <= 0 or copied >= STEP_BYTES:
                break
            lacking -= shelf.block_bytes
            if block.tokens == BLOCK_SIZE and not self._tier.has(shelf.layout, block.hash):
                if not self._offer(shelf, block):
                    break
                copied += shelf.block_bytes
        return copied

    def _offer(self, shelf: Shelf, block: Block) -> bool:
        arena = self._store.arena_of(shelf.layout)
        return arena is not None and self._tier.offer(shelf.layout, arena.carried(block.slot))


def _lacking(room: Room) -> float:
    """Bytes that would have to be evicted before that much could be written."""
    free = sum((len(shelf.free) + len(shelf.preparing)) * shelf.block_bytes for shelf in room.shelves.values())
    return min(AHEAD_BYTES, AHEAD_SHARE * room.budget) - free - (room.limit - room.memory)
