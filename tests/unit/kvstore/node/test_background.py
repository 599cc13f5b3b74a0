"""The store's memory is taken ahead of its use, several slots at a time, as far as there is any."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.arena.owned_arena import OwnedArena
from kvstore.core.layout import PAGE
from kvstore.node import background
from kvstore.node.background import PREPARE_PARTS, MemoryPreparation
from kvstore.node.node_store import NodeStore
from tests.support.kv.arenas import Client, Clock, chain, new_directory, remove, store_in
from tests.support.kv.store_invariants import check

DEADLINE = 60


@pytest.fixture
def directory() -> Iterator[Path]:
    directory = new_directory()
    yield directory
    remove(directory)


async def prepared(store: NodeStore, layout: str, enough: int) -> None:
    """Runs the preparation until so many slots of the layout are free."""
    preparation = MemoryPreparation(store)
    preparation.request(layout)
    running = asyncio.create_task(preparation.run())
    async with asyncio.timeout(DEADLINE):
        while len(store.core.budget.tables[layout].free) < enough:
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_small_blocks_get_their_memory_together_and_never_a_large_part_of_the_budget(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = OwnedArena.take_memory

    def counted(arena: OwnedArena, *slots: int) -> int:
        taken.append(len(slots))
        return take(arena, *slots)

    monkeypatch.setattr(OwnedArena, "take_memory", counted)
    total = 8 * PREPARE_PARTS
    store = store_in(directory, total * PAGE, Clock())
    engine = Client(store)
    await prepared(store, engine.layout, total // 4 - 4)
    assert sum(taken) >= total // 4 - 4
    assert max(taken) == total // PREPARE_PARTS == 8
    check(store.core)
    assert engine.save(chain("a", 20)) == 20
    store.close()


async def test_where_the_system_has_no_more_what_it_gave_is_there(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "BETWEEN_PREPARATIONS", 0.0)
    take = OwnedArena.take_memory
    left = [5]

    def scarce(arena: OwnedArena, *slots: int) -> int:
        given = slots[: left[0]]
        left[0] -= len(given)
        return take(arena, *given)

    monkeypatch.setattr(OwnedArena, "take_memory", scarce)
    store = store_in(directory, 4 * PREPARE_PARTS * PAGE, Clock())
    engine = Client(store)
    await prepared(store, engine.layout, 5)
    table = store.core.budget.tables[engine.layout]
    assert (len(table.free), len(table.preparing)) == (5, 0)
    check(store.core)
    assert store.prepare(engine.layout) is None, "it is not asked again at once"
    store.close()
