"""The store's background work: allocates memory for slots and spills blocks to the lower tier ahead of need."""

from __future__ import annotations

import asyncio

from kvstore.core.memory_budget import MemoryBudget, next_victims
from kvstore.core.slot_table import SlotTable, StoredBlock
from kvstore.node.node_store import NodeStore
from kvstore.tiers.interface import EvictionTarget
from shared.reliability.retry import Backoff

PREPARE_BYTES = 2 * 2**20
"""Taken at a time: less than a millisecond's work."""
PREPARE_PARTS = 64
"""At most one of so many parts of the budget is taken at a time: meanwhile nobody can write there, and blocks may be
evicted in its place."""
BETWEEN_PREPARATIONS = 0.05
"""Seconds from one round to the next. Small blocks are cheaper taken together: for one it costs more to go to the other
thread and back than to take its memory. Much more is prepared than sequences fill meanwhile."""


class MemoryPreparation:
    """Owns the order in which layouts get memory ahead of its use, taken on another thread."""

    def __init__(self, store: NodeStore) -> None:
        self._store = store
        self._layouts: dict[str, None] = {}
        self._requested = asyncio.Event()

    def request(self, layout: str) -> None:
        """Blocks of this layout are being written: memory is taken for more of them."""
        self._layouts[layout] = None
        self._requested.set()

    async def run(self) -> None:
        """Takes memory as requested, until cancelled."""
        while True:
            await self._requested.wait()
            layout = next(iter(self._layouts))
            while await self._prepare_some(layout):
                pass
            del self._layouts[layout]
            if not self._layouts:
                self._requested.clear()
                await asyncio.sleep(BETWEEN_PREPARATIONS)

    async def _prepare_some(self, layout: str) -> bool:
        """Whether there may be more to take."""
        arena = self._store.arena_of(layout)
        slots: list[int] = []
        if arena is None:
            return False
        most = min(PREPARE_BYTES, self._store.core.budget.total // PREPARE_PARTS) // arena.geometry.payload_stride
        while len(slots) < max(1, most) and (slot := self._store.prepare(layout)) is not None:
            slots.append(slot)
        taken = await asyncio.to_thread(arena.take_memory, *slots) if slots else 0
        for number, slot in enumerate(slots):
            self._store.prepared(arena, slot, number < taken)
        return 0 < len(slots) == taken


# Offers blocks to the tiers below before they must make budget: a little at a time, while no request waits.
#
# Without it a `Reserve` in a full arena would wait until the blocks that were there are copied for the tiers;
# and of a long chain that goes at once only its end, which goes first, would find room on the way.


SPILL_AHEAD_BYTES = 256 * 2**20
SPILL_AHEAD_SHARE = 0.25
"""What can be written without waiting for the tiers, and its largest share of the budget."""
STEP_BYTES = 4 * 2**20
"""Copied at a time."""
BETWEEN_STEPS = 0.002
IDLE = Backoff(first=0.02, longest=0.32)
"""Seconds until the next check if there was nothing to do."""


class BackgroundSpill:
    """Sees to it that the next blocks to be evicted are in a lower tier already."""

    def __init__(self, store: NodeStore, tier: EvictionTarget) -> None:
        self._store = store
        self._tier = tier

    async def run(self) -> None:
        """Spills a little at a time, until cancelled."""
        idle = 0
        while True:
            copied = self.step()
            idle = 0 if copied else idle + 1
            await self._store.copying(copied)
            await asyncio.sleep(BETWEEN_STEPS if copied >= STEP_BYTES else IDLE.pause(idle))

    def step(self) -> int:
        """Offers the blocks that are evicted next, STEP_BYTES at the most; returns how many bytes."""
        budget = self._store.core.budget
        lacking, copied = _lacking(budget), 0
        for table, block in next_victims(budget.tables.values()):
            if lacking <= 0 or copied >= STEP_BYTES:
                break
            lacking -= table.block_bytes
            if block.tokens == table.block_size and not self._tier.has(table.layout, block.hash):
                if not self._offer(table, block):
                    break
                copied += table.block_bytes
        return copied

    def _offer(self, table: SlotTable, block: StoredBlock) -> bool:
        arena = self._store.arena_of(table.layout)
        return arena is not None and self._tier.offer(table.layout, arena.in_flight(block.slot))


def _lacking(budget: MemoryBudget) -> float:
    """Bytes that would have to be evicted before that much could be written."""
    free = sum((len(table.free) + len(table.preparing)) * table.block_bytes for table in budget.tables.values())
    return min(SPILL_AHEAD_BYTES, SPILL_AHEAD_SHARE * budget.total) - free - (budget.limit - budget.memory)
