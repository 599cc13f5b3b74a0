"""A scheduler and simulated workers on one in-memory bus, with a detokenizer and a gateway that only take notes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from services.scheduler.actor import SchedulerActor
from services.scheduler.connector_host import SchedulerConnector
from services.scheduler.core.invariants import check
from services.scheduler.core.limits import EngineLimits
from services.scheduler.journal import JournalSettings
from services.worker.actor import WorkerActor
from services.worker.backend import Backend
from services.worker.kv.connector_thread import ConnectorThread
from services.worker.rank_identity import RankIdentity
from services.worker.sim.accelerator import PROFILES
from services.worker.sim.backend import create_sim_backend
from services.worker.sim.tokens import SimSpeculation
from shared import topics
from shared.actor import ActorRuntime
from shared.bus import Bus, UndeliveredHandler
from shared.bus.memory_bus import MemoryBus
from shared.ids import EngineId, InstanceId, ModelName
from shared.messages.detokenizer import NewTokens, OpenStream, TokenBatch
from shared.messages.gateway import GatewayMessage, RequestFailed, RequestRejected
from shared.messages.lifecycle import Lifecycle
from shared.messages.scheduler import GenerateRequest
from tests.support.engines.checking_worker import DETOKENIZER, GATEWAY

ENGINE = EngineId("engine-1")
EOS = 1
WORDS = ["<unk>", "</s>", *(f"w{i}" for i in range(30))]


def make_model(folder: Path) -> Path:
    """A model directory as far as a simulated worker reads it."""
    folder.mkdir(exist_ok=True)
    config = {
        "vocab_size": len(WORDS),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "dtype": "bfloat16",
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def sim_backend(
    model: Path,
    *,
    step_seconds: float | None = 0.0,
    kv_memory_bytes: int = 2**20,
    speculation: SimSpeculation | None = None,
) -> Backend:
    return create_sim_backend(
        model,
        model_name=ModelName("m"),
        dtype="auto",
        max_model_len=None,
        kv_memory_bytes=kv_memory_bytes,
        block_size=16,
        world_size=1,
        accelerator=PROFILES["l4"],
        profile="l4",
        step_seconds=step_seconds,
        time_scale=1.0,
        speculation=speculation,
    )


@dataclass
class Notes:
    """What the engine said to the detokenizer and the gateway, and everybody's last lifecycle."""

    opened: list[OpenStream] = field(default_factory=list)
    entries: list[NewTokens] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    final: list[RequestRejected | RequestFailed] = field(default_factory=list)
    lives: dict[str, Lifecycle] = field(default_factory=dict)

    def output_of(self, request: str, attempt: int = 1) -> list[int]:
        entries = [e for e in self.entries if (e.request, e.attempt) == (request, attempt)]
        return [token for entry in entries for token in entry.tokens]

    def finished(self, request: str, attempt: int = 1) -> bool:
        return any((e.request, e.attempt) == (request, attempt) and e.finish for e in self.entries)


class _WorkersBus:
    """The shared bus as a worker's connection: a bus has one handler of undelivered messages, and that is the
    scheduler's here."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    def on_undelivered(self, handler: UndeliveredHandler) -> None:
        pass


class EngineOnABus:
    def __init__(
        self,
        bus: MemoryBus,
        limits: EngineLimits | None = None,
        journal: JournalSettings | None = None,
        connector: SchedulerConnector | None = None,
    ) -> None:
        self.bus = bus
        self.notes = Notes()
        self.scheduler = SchedulerActor(
            bus, InstanceId(ENGINE), limits or EngineLimits(), connector=connector, journal=journal
        )
        self.runtimes: dict[str, tuple[ActorRuntime, asyncio.Task[None]]] = {}

    async def start(self) -> None:
        await self.bus.subscribe(topics.detokenizer_tokens(DETOKENIZER), self._note_batch)
        await self.bus.subscribe(topics.gateway_inbox(GATEWAY), self._note_final)
        await self.bus.subscribe(topics.lifecycles(), self._note_life)
        self._run(self.scheduler)

    async def _note_batch(self, batch: TokenBatch) -> None:
        self.notes.opened += batch.opened
        self.notes.entries += batch.entries
        self.notes.numbers.append(batch.number)

    async def _note_final(self, message: GatewayMessage) -> None:
        assert isinstance(message, RequestRejected | RequestFailed)
        self.notes.final.append(message)

    async def _note_life(self, life: Lifecycle) -> None:
        self.notes.lives[life.instance] = life

    def add_worker(
        self,
        make: Callable[[], Backend],
        rank: int = 0,
        world_size: int = 1,
        connector: ConnectorThread | None = None,
    ) -> str:
        instance = InstanceId(f"{ENGINE}-rank{rank}")
        bus = cast(Bus, _WorkersBus(self.bus))
        self._run(WorkerActor(bus, instance, RankIdentity(ENGINE, rank, world_size), make, connector=connector))
        return instance

    def _run(self, actor: SchedulerActor | WorkerActor) -> None:
        runtime = ActorRuntime(actor, drain_timeout=1.0)
        self.runtimes[actor.instance] = (runtime, asyncio.create_task(runtime.run()))

    async def kill(self, instance: str) -> None:
        """The end of a process as the supervisor announces it: no drain, no last words of its own."""
        _, task = self.runtimes.pop(instance)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def generate(self, request: GenerateRequest) -> None:
        await self.bus.publish(topics.engine_requests(ENGINE), request)

    async def until(self, condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"never happened: {what}") from None

    async def ready(self) -> None:
        await self.until(lambda: self.scheduler.core.epoch_state is not None, "the engine is ready")

    async def finished(self, *requests: str, attempt: int = 1) -> None:
        await self.until(lambda: all(self.notes.finished(r, attempt) for r in requests), f"{requests} finish")

    @property
    def free_blocks(self) -> tuple[int, int]:
        report = self.scheduler.core.report()
        assert report is not None
        return report.blocks_free, report.blocks_total

    async def stop(self) -> None:
        check(self.scheduler.core)
        for runtime, task in self.runtimes.values():
            runtime.stop()
            await task


@contextlib.asynccontextmanager
async def engine_on_a_bus(
    bus: MemoryBus,
    limits: EngineLimits | None = None,
    journal: JournalSettings | None = None,
    connector: SchedulerConnector | None = None,
) -> AsyncIterator[EngineOnABus]:
    engine = EngineOnABus(bus, limits, journal, connector)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
