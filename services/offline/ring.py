"""One ring of actors on an in-memory bus: the composition of a process that serves nobody but itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.types import ASGIApp

from services.coordinator.__main__ import build as build_coordinator
from services.detokenizer.__main__ import build as build_detokenizer
from services.detokenizer.__main__ import load as load_vocabulary
from services.gateway.actor import Gateway
from services.offline.errors import EngineFailed
from services.offline.rank_link import MAX_PAYLOAD
from services.offline.ranks import RankProcesses
from services.offline.settings import Configs
from services.scheduler.__main__ import build as build_scheduler
from services.scheduler.actor import SchedulerActor
from services.tokenizer.__main__ import build as build_tokenizer
from services.tokenizer.__main__ import load as load_encoding
from services.worker.__main__ import build as build_worker
from services.worker.backend import BackendError
from shared.actor import Actor, ActorRuntime
from shared.blocks import BLOCK_SIZE
from shared.bus.memory_bus import MemoryBus
from shared.error_groups import innermost
from shared.model_files import ModelNotFound, resolve_model
from shared.tokenizer_files import TokenizerUnusable

LOOK_EVERY = 0.005
DRAIN_SECONDS = 1.0
LONGEST_STRETCH = 0.5
"""Seconds that count of one in which the loop did not run."""


class LoopClock:
    """Seconds during which the event loop ran. Everybody lives on one loop here: whoever was silent while it stood
    still (a notebook's cell kept the interpreter to itself) was not gone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before = clock()
        self._ran = 0.0

    def now(self) -> float:
        now = self._clock()
        self._ran += min(now - self._before, LONGEST_STRETCH)
        self._before = now
        return self._ran


class Ring:
    """Owns the actors from loading the model to their end. Every method runs on one event loop."""

    def __init__(self, configs: Configs) -> None:
        """Loads tokenizer and templates. Raises EngineFailed."""
        self._configs = configs
        self.bus = MemoryBus(MAX_PAYLOAD, LoopClock().now)
        try:
            folder = resolve_model(configs.tokenizer.model, weights=configs.ranks[0].reads_weights)
            self._encoding = load_encoding(configs.tokenizer, folder)
            self._vocabulary = load_vocabulary(folder)
        except (ModelNotFound, TokenizerUnusable) as error:
            raise EngineFailed(str(error)) from None
        self._runtimes: list[ActorRuntime] = []
        self._ranks: RankProcesses | None = None
        self._running: asyncio.Task[None] | None = None
        self._gateway: Gateway | None = None
        self._scheduler: SchedulerActor | None = None

    @property
    def context(self) -> int:
        """Tokens that a sequence may reach, once started."""
        assert self._scheduler is not None, "not started"
        report = self._scheduler.engine_report()
        if report is None:
            raise EngineFailed("the engine has no workers")
        return min(report.model.max_model_len, report.blocks_total * BLOCK_SIZE)

    @property
    def app(self) -> ASGIApp:
        """The gateway's HTTP application, once started."""
        assert self._gateway is not None, "not started"
        return self._gateway.app

    async def start(self, timeout: float) -> None:
        """Returns when requests are served. Raises EngineFailed; then nothing runs any more."""
        actors = await self._actors()
        self._runtimes = [ActorRuntime(actor, drain_timeout=DRAIN_SECONDS) for actor in actors]
        self._running = asyncio.create_task(self._run())
        try:
            async with asyncio.timeout(timeout):
                while self._gateway is None or self._gateway.desk.not_serving() is not None:
                    if self._running.done():
                        raise self.failure()
                    await asyncio.sleep(LOOK_EVERY)
        except TimeoutError:
            await self.stop()
            raise EngineFailed(f"the model was not ready within {timeout:g} s") from None

    async def _actors(self) -> list[Actor]:
        configs = self._configs
        worker: list[Actor] = []
        if len(configs.ranks) == 1:
            worker.append(await build_worker(configs.ranks[0], self.bus.connection()))
        else:
            self._ranks = RankProcesses(configs.ranks, self.bus.connection())
        self._gateway = Gateway(self.bus.connection(), configs.gateway, listens=False)
        self._scheduler = build_scheduler(configs.scheduler, self.bus.connection())
        return [
            self._gateway,
            build_tokenizer(configs.tokenizer, self._encoding, self.bus.connection()),
            build_coordinator(configs.coordinator, self.bus.connection()),
            self._scheduler,
            *worker,
            build_detokenizer(configs.detokenizer, self._vocabulary, self.bus.connection()),
        ]

    async def _run(self) -> None:
        """Until `stop`; the end of one actor, which can only be a bug or a model that does not load, ends all."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for runtime in self._runtimes:
                    tasks.create_task(runtime.run())
                if self._ranks is not None:
                    tasks.create_task(self._ranks.run())
        finally:
            await self.bus.close()

    async def ended(self) -> None:
        """Returns when the ring has ended, for whatever reason."""
        assert self._running is not None, "not started"
        await asyncio.wait([self._running])

    def failure(self) -> EngineFailed:
        """Why the ring has ended."""
        assert self._running is not None, "not started"
        error = None if self._running.cancelled() else self._running.exception()
        first = None if error is None else innermost(error)
        if isinstance(first, BackendError | EngineFailed):
            return EngineFailed(str(first))
        failed = EngineFailed("the engine was closed" if first is None else f"the engine ended: {first!r}")
        failed.__cause__ = first
        return failed

    async def stop(self) -> None:
        """Ends every actor; what is in hand is given up after DRAIN_SECONDS."""
        for runtime in self._runtimes:
            runtime.stop()
        if self._ranks is not None:
            self._ranks.stop()
        if self._running is not None:
            await asyncio.wait([self._running])
