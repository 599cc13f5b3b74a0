"""What batches leave to other requests."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from services.gateway.batches.window import BatchWindow, EngineRoom


@pytest.mark.parametrize(
    ("places", "taken", "allowed"),
    [(100, 0, 75), (100, 50, 25), (100, 75, 0), (100, 300, 0), (0, 0, 1), (1, 0, 1), (1, 1, 0), (1000, 0, 500)],
)
def test_lines_take_three_quarters_of_what_is_free(places: int, taken: int, allowed: int) -> None:
    assert BatchWindow(500, lambda: EngineRoom(places, taken)).allowed() == allowed


async def test_lines_wait_for_others_and_their_own_do_not_count_as_others() -> None:
    taken = 0
    window = BatchWindow(100, lambda: EngineRoom(8, taken))
    async with AsyncExitStack() as lines:
        for _ in range(6):
            await lines.enter_async_context(window.line())
            taken += 1
        assert window.open == 6
        waiting = asyncio.create_task(lines.enter_async_context(window.line()))
        await asyncio.sleep(0.15)
        assert not waiting.done()
        waiting.cancel()
    assert window.open == 0

    taken = 8  # by requests of clients
    async with AsyncExitStack() as lines:
        waiting = asyncio.create_task(lines.enter_async_context(window.line()))
        await asyncio.sleep(0.15)
        assert not waiting.done()
        taken = 2
        await asyncio.wait_for(waiting, 60)
