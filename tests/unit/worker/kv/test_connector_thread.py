"""How a rank's forward pass and its KV connector wait for each other, layer by layer, and for how long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvstore.connectors.interface import ConnectorConfig, KVConnectorBase
from services.worker.kv import connector_thread
from services.worker.kv.connector_thread import ConnectorThread
from services.worker.kv.copier import RankKvCache
from shared.ids import Incarnation
from shared.messages.worker import ConnectorLoad, ConnectorPlan, KvBlockRun, StepPlan
from shared.packing import pack

torch = pytest.importorskip("torch")

LAYERS = 3
EPOCH = Incarnation(1)


class Slow(KVConnectorBase):
    """Loads a layer when the test says so."""

    layerwise = True

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self.may_load = threading.Semaphore(0)
        self.loaded: list[str] = []
        self.fails_at = ""

    def wait_for_layer_load(self, layer_name: str) -> None:
        assert self.may_load.acquire(timeout=60.0)
        if layer_name == self.fails_at:
            raise RuntimeError("no")
        self.loaded.append(layer_name)


def share() -> RankKvCache:
    caches = [(torch.zeros(4, 2), torch.zeros(4, 2)) for _ in range(LAYERS)]
    unused: Any = None
    return RankKvCache(unused, 0, 1, True, 4, unused, 0, LAYERS, caches)


@asynccontextmanager
async def started() -> AsyncIterator[tuple[ConnectorThread, Slow]]:
    connector = Slow(ConnectorConfig("e", "kv_both", {}, 0, 16))
    thread = ConnectorThread(connector)
    thread.start(share(), 1)
    thread.begin()
    yield thread, connector
    connector.may_load.release(LAYERS * 3)
    await thread.stop()


def plan(*overlapped: bool, step: int = 0) -> StepPlan:
    run = KvBlockRun("r-1", 0, pack([1]), bytes(16))
    loads = [ConnectorLoad(number=step + i, run=run, overlapped=each) for i, each in enumerate(overlapped)]
    return StepPlan(epoch=EPOCH, step=step, connector=ConnectorPlan(loads=tuple(loads), metadata=b""))


def computed(thread: ConnectorThread, planned: StepPlan) -> threading.Thread:
    """A thread that computes the step, layer by layer."""

    def compute() -> None:
        thread.before_step(planned)
        for layer in range(LAYERS):
            thread.layer_stored(layer)
        thread.after_step()

    computing = threading.Thread(target=compute, daemon=True)
    computing.start()
    return computing


async def ended(thread: ConnectorThread) -> tuple[int, bool]:
    over = await asyncio.wait_for(thread.next_ended(), 60.0)
    return over.number, over.failed


async def joined(computing: threading.Thread) -> None:
    await asyncio.to_thread(computing.join, 60.0)
    assert not computing.is_alive()


async def test_each_layer_is_computed_as_soon_as_it_is_loaded_while_those_behind_it_still_are() -> None:
    async with started() as (thread, connector):
        thread.before_step(plan(True))
        for layer in range(LAYERS):
            connector.may_load.release()  # one layer, and only this one
            await asyncio.to_thread(thread.layer_stored, layer)
            assert len(connector.loaded) == layer + 1
        thread.after_step()
        assert await ended(thread) == (0, False)


async def test_a_step_that_computes_nothing_behind_its_loads_waits_for_none() -> None:
    async with started() as (thread, connector):
        await joined(computed(thread, plan(False)))
        assert connector.loaded == []
        connector.may_load.release(LAYERS)
        assert await ended(thread) == (0, False)


async def test_a_step_goes_on_at_once_when_its_load_fails() -> None:
    async with started() as (thread, connector):
        connector.fails_at = "model.layers.1"
        computing = computed(thread, plan(True))
        connector.may_load.release(LAYERS)
        await joined(computing)
        assert await ended(thread) == (0, True)


async def test_a_step_goes_on_without_layers_that_hang_and_the_next_ones_wait_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connector_thread, "LAYERS_TIMEOUT", 0.05)
    async with started() as (thread, connector):
        connector.may_load.release()
        await joined(computed(thread, plan(True, False)))
        monkeypatch.setattr(connector_thread, "LAYERS_TIMEOUT", 3600.0)
        await joined(computed(thread, plan(True, step=2)))
        connector.may_load.release(LAYERS * 2)
        assert [await ended(thread) for _ in range(3)] == [(0, True), (1, False), (2, True)]
        computing = computed(thread, plan(True, step=3))
        connector.may_load.release(LAYERS)
        await joined(computing)
        assert await ended(thread) == (3, False), "once it is over, loads are waited for again"
