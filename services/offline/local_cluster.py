"""All services on one event loop and an in-memory bus, for a process that serves only itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from services.coordinator.__main__ import build as build_coordinator
from services.detokenizer.__main__ import build as build_detokenizer
from services.detokenizer.__main__ import load as load_vocabulary
from services.gateway.actor import Gateway
from services.gateway.http.local_call import LocalAnswer, local_call
from services.offline.errors import EngineFailed
from services.offline.ranks import MAX_PAYLOAD, RankProcesses
from services.offline.settings import ServiceConfigs
from services.scheduler.__main__ import build as build_scheduler
from services.scheduler.actor import SchedulerActor
from services.tokenizer.__main__ import build as build_tokenizer
from services.tokenizer.__main__ import load as load_encoding
from services.worker.__main__ import build as build_worker
from services.worker.backend import BackendError
from shared.actor import Actor, ActorRuntime
from shared.bus.memory_bus import MemoryBus
from shared.error_groups import innermost
from shared.messages.lifecycle import EngineReport
from shared.messages.model_card import EncoderDecoderModel
from shared.models.encoder_models import read_encoder_decoder
from shared.models.image_models import read_image_model
from shared.models.model_files import ModelNotFound, resolve_model
from shared.models.tokenizer_files import TokenizerUnusable

POLL_SECONDS = 0.005
DRAIN_SECONDS = 1.0
MAX_PAUSE = 0.5
"""Most seconds that the clock counts for one pause of the event loop, however long it was."""


class LoopClock:
    """Counts the seconds in which the event loop ran. All actors share that loop: an actor that was silent while the
    loop was blocked (a notebook's cell kept the interpreter busy) has not failed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before = clock()
        self._ran = 0.0

    def now(self) -> float:
        """Returns the seconds since the start."""
        now = self._clock()
        self._ran += min(now - self._before, MAX_PAUSE)
        self._before = now
        return self._ran


class LocalCluster:
    """Owns the actors from loading the model to their end. Every method runs on one event loop."""

    def __init__(self, configs: ServiceConfigs) -> None:
        """Loads tokenizer and templates. Raises EngineFailed."""
        self._configs = configs
        self.bus = MemoryBus(MAX_PAYLOAD, LoopClock().now)
        try:
            self._folder = resolve_model(configs.tokenizer.model, weights=configs.ranks[0].reads_weights)
            self._encoding = load_encoding(configs.tokenizer, self._folder)
            self._vocabulary = load_vocabulary(self._folder)
        except (ModelNotFound, TokenizerUnusable) as error:
            raise EngineFailed(str(error)) from None
        self._runtimes: list[ActorRuntime] = []
        self._ranks: RankProcesses | None = None
        self._running: asyncio.Task[None] | None = None
        self._gateway: Gateway | None = None
        self._scheduler: SchedulerActor | None = None

    @property
    def context(self) -> int:
        """Tokens that a sequence may reach; known once started. Raises EngineFailed."""
        report = self._report()
        return min(report.model.max_model_len, report.blocks_total * report.model.block_size)

    @property
    def encoder_decoder(self) -> EncoderDecoderModel | None:
        """See `ModelCard.encoder_decoder`; as `context`."""
        return self._report().model.encoder_decoder

    def _report(self) -> EngineReport:
        assert self._scheduler is not None, "not started"
        report = self._scheduler.engine_report()
        if report is None:
            raise EngineFailed("the engine has no workers")
        return report

    async def start(self, timeout: float) -> None:
        """Returns when requests are served. Raises EngineFailed; nothing runs any more then."""
        actors = await self._actors()
        self._runtimes = [
            ActorRuntime(actor, drain_timeout=DRAIN_SECONDS, block_size=self._configs.tokenizer.block_size)
            for actor in actors
        ]
        self._running = asyncio.create_task(self._run())
        try:
            async with asyncio.timeout(timeout):
                while self._gateway is None or self._gateway.requests.not_serving() is not None:
                    if self._running.done():
                        raise self._failure()
                    await asyncio.sleep(POLL_SECONDS)
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
        self._parsing_app, self._plain_app = self._gateway.app, self._gateway.make_app(None)
        self._scheduler = build_scheduler(configs.scheduler, self.bus.connection())
        return [
            self._gateway,
            build_tokenizer(configs.tokenizer, self._encoding, self.bus.connection()),
            build_coordinator(configs.coordinator, self.bus.connection()),
            self._scheduler,
            *worker,
            *self._encoders(),
            build_detokenizer(configs.detokenizer, self._vocabulary, self.bus.connection()),
        ]

    def _encoders(self) -> list[Actor]:
        """What encodes images or prompts; nothing where the model has none encoded."""
        worker = self._configs.ranks[0]
        images = None if worker.language_model_only else read_image_model(self._folder)
        if (images or read_encoder_decoder(self._folder)) is None or not worker.reads_weights:
            return []
        from services.encoder.__main__ import build as build_encoder  # seconds of imports, which no other model pays

        return [build_encoder(self._configs.encoder, self._folder, self.bus.connection())]

    async def _run(self) -> None:
        """Runs until `stop`. One actor's end, which only a bug or a model that does not load can cause, ends all."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for runtime in self._runtimes:
                    tasks.create_task(runtime.run())
                if self._ranks is not None:
                    tasks.create_task(self._ranks.run())
        finally:
            await self.bus.close()

    async def call(
        self, method: str, path: str, body: bytes, request_id: str | None = None, *, parsed: bool = True
    ) -> LocalAnswer:
        """Sends one request, not streamed, to the gateway's HTTP application, and returns its answer. `parsed`: whether
        tool calls and reasoning of chats are looked for. Cancelling it gives the request up. Raises EngineFailed where
        the cluster ends meanwhile."""
        assert self._running is not None, "not started"
        app = self._parsing_app if parsed else self._plain_app
        answering = asyncio.create_task(local_call(app, method, path, body, request_id))
        try:
            await asyncio.wait([answering, self._running], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise self._failure()
            return await answering
        finally:
            if not answering.done():
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)

    def _failure(self) -> EngineFailed:
        """Why the cluster has ended."""
        assert self._running is not None, "not started"
        error = None if self._running.cancelled() else self._running.exception()
        first = None if error is None else innermost(error)
        if isinstance(first, BackendError | EngineFailed):
            return EngineFailed(str(first))
        failed = EngineFailed("the engine was closed" if first is None else f"the engine ended: {first!r}")
        failed.__cause__ = first
        return failed

    async def stop(self) -> None:
        """Ends every actor; unfinished requests are given up after DRAIN_SECONDS."""
        for runtime in self._runtimes:
            runtime.stop()
        if self._ranks is not None:
            self._ranks.stop()
        if self._running is not None:
            await asyncio.wait([self._running])
