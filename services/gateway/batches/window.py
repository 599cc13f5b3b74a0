"""How many lines of batches are under way: what other requests leave free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

SHARE = 0.75
"""Of the sequences that engines run at once; the rest is free for a request that comes now."""
LOOK_EVERY = 0.05
"""Seconds between two looks at how full the engines are, while lines wait."""


class EngineRoom(NamedTuple):
    """How full the engines of a stack are, as they last reported."""

    places: int
    """Sequences that they run at once."""
    taken: int
    """Sequences that they run, and that wait for them."""


class BatchWindow:
    """Owns the number of lines that this gateway has under way."""

    def __init__(self, limit: int, room: Callable[[], EngineRoom]) -> None:
        """`limit`: lines at most, however much is free."""
        self._limit, self._room = limit, room
        self._turn = asyncio.Lock()
        self._left = asyncio.Event()
        self.open = 0

    @asynccontextmanager
    async def line(self) -> AsyncIterator[None]:
        """Waits until one more line may be sent, and counts it as long as this is entered. Lines go in order of their
        arrival here."""
        async with self._turn:
            while self.open >= self.allowed():
                self._left.clear()
                try:
                    async with asyncio.timeout(LOOK_EVERY):
                        await self._left.wait()
                except TimeoutError:
                    pass
            self.open += 1
        try:
            yield
        finally:
            self.open -= 1
            self._left.set()

    def allowed(self) -> int:
        """How many lines may be under way now."""
        room = self._room()
        others = max(0, room.taken - self.open)
        return max(0, min(self._limit, max(1, int(SHARE * room.places)) - others))
