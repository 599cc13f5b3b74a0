"""An engine of one tiny model whose blocks a KV connector loads and saves, on an in-memory bus."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from kvstore.connectors.installed import keeps_blocks
from kvstore.connectors.interface import KVConnectorBase, KVRole
from services.scheduler.connector_host import SchedulerConnector
from services.scheduler.core.limits import ConnectorUse, EngineLimits
from services.worker.kv.connector_thread import ConnectorThread
from shared.bus.memory_bus import MemoryBus
from shared.messages.generation import PromptEmbeds
from tests.support.engines.checking_worker import generate
from tests.support.engines.engine_on_a_bus import EngineOnABus, engine_on_a_bus
from tests.support.models.tiny_images import ImageModel
from tests.support.models.tiny_models import TinyModel
from tests.support.worker.plan_driver import GREEDY
from tests.support.worker.tiny_backend import tiny_backend

PROMPT = [5 + i * 7 % 149 for i in range(133)]
COUNT = 6
LIMITS = EngineLimits(max_batch_tokens=48, max_running=8, store_deadline=5.0, canary_interval=0.0)
"""A prompt takes three steps, so that layers are saved while it is computed."""


@dataclass
class Halves:
    """Of one connector, as the engine has them."""

    scheduler: KVConnectorBase
    worker: KVConnectorBase


Make = Callable[[int | None], KVConnectorBase]
"""One half: of a rank, or (None) of the scheduler."""


@asynccontextmanager
async def connector_engine(
    model: TinyModel | ImageModel,
    make: Make,
    role: KVRole = "kv_both",
    ops: str = "torch",
    limits: EngineLimits = LIMITS,
) -> AsyncIterator[tuple[EngineOnABus, Halves]]:
    """Scheduler and rank are the real ones."""
    halves = Halves(make(None), make(0))
    loads, saves = role != "kv_producer", role != "kv_consumer"
    use = ConnectorUse(loads, saves, keeps=saves and keeps_blocks(halves.scheduler))
    thread = ConnectorThread(halves.worker)
    on_layer = thread.layer_stored if thread.layerwise else None
    bus = MemoryBus()
    async with engine_on_a_bus(bus, limits, connector=SchedulerConnector(halves.scheduler, use)) as running:
        running.add_worker(
            lambda: tiny_backend(
                model.path,
                max_batch_tokens=48,
                max_num_seqs=8,
                ops=ops,
                block_size=halves.worker.config.block_size,
                on_layer=on_layer,
            ),
            connector=thread,
        )
        await running.ready()
        yield running, halves


async def ask(
    engine: EngineOnABus, name: str, prompt: list[int] = PROMPT, embeds: PromptEmbeds | None = None
) -> tuple[list[int], int]:
    """(output, prompt tokens that were not computed)."""
    epoch = engine.scheduler.core.epoch_state
    assert epoch is not None
    size = epoch.memory.block_size
    request = generate(name, prompt, max_tokens=COUNT, ignore_eos=True, block_size=size, embeds=embeds)
    await engine.generate(replace(request, generation=replace(request.generation, sampling=GREEDY)))
    await engine.finished(name)
    (opened,) = [each for each in engine.notes.opened if each.request == name]
    return engine.notes.output_of(name), opened.cached_tokens


async def saved(engine: EngineOnABus, blocks: int) -> None:
    """Returns once so many blocks are saved."""
    counters = engine.scheduler.core.counters
    await engine.until(lambda: counters.blocks_saved >= blocks, f"{blocks} blocks are saved")


async def at_rest(engine: EngineOnABus) -> None:
    """Returns once the engine is idle, and no block is held."""

    def rests() -> bool:
        free, total = engine.free_blocks
        return engine.scheduler.is_idle() and free == total

    await engine.until(rests, "no block is held")
