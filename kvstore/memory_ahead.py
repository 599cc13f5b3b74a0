"""Takes memory for slots before it is asked for, on another thread: whoever reserves finds it there."""

from __future__ import annotations

import asyncio

from kvstore.node_store import NodeStore


class MemoryAhead:
    """Owns the order in which layouts get memory."""

    def __init__(self, store: NodeStore) -> None:
        self._store = store
        self._layouts: dict[str, None] = {}
        self._wanted = asyncio.Event()

    def wanted(self, layout: str) -> None:
        """Blocks of this layout are being written."""
        self._layouts[layout] = None
        self._wanted.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wanted.wait()
            layout = next(iter(self._layouts))
            while await self._prepare_one(layout):
                pass
            del self._layouts[layout]
            if not self._layouts:
                self._wanted.clear()

    async def _prepare_one(self, layout: str) -> bool:
        arena, slot = self._store.arena_of(layout), self._store.prepare(layout)
        if arena is None or slot is None:
            return False
        taken = await asyncio.to_thread(arena.take_memory, slot)
        self._store.prepared(arena, slot, taken)
        return taken
