"""The gateway as an actor: its subscriptions, and when its HTTP server listens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, assert_never

from starlette.applications import Starlette

from services.gateway.api.batches.lines import BatchAnswer, BatchRequest
from services.gateway.audio.audio_decoder import AudioDecoder
from services.gateway.batches.batch_run import BatchRun
from services.gateway.batches.batch_store import BatchObject, BatchStore
from services.gateway.batches.file_store import FileStore
from services.gateway.batches.runner import BatchRunner
from services.gateway.batches.window import BatchWindow, EngineRoom
from services.gateway.config import GatewayConfig
from services.gateway.console.feed import ConsoleFeed
from services.gateway.console.overview import overview_of
from services.gateway.conversations.chat_store import ChatLimits, ChatStore
from services.gateway.core.api_keys import KeyFileError, KeyName
from services.gateway.core.cluster import REQUIRED_SERVICES
from services.gateway.core.remote_clusters import RemoteClusters
from services.gateway.core.stream_records import GatewayRun, StreamRecords
from services.gateway.database.expiry import remove_expired
from services.gateway.database.records import Database
from services.gateway.federation.admin import ADMIN_DESCRIPTION, ADMIN_NAME, ADMIN_VERSION, ClusterAdmin
from services.gateway.federation.drain_file import DrainFile
from services.gateway.federation.federation import Federation
from services.gateway.http.access import AccessControl
from services.gateway.http.admin.fleet import FleetEndpoints
from services.gateway.http.admin.pauses import PauseEndpoints
from services.gateway.http.admin.sleeps import SleepEndpoints
from services.gateway.http.apis.background import BackgroundResponses
from services.gateway.http.apis.batches import BatchEndpoints
from services.gateway.http.apis.message_batches import MessageBatchEndpoints
from services.gateway.http.app import build_app
from services.gateway.http.body_parser import BodyContext, BodyKind, BodyParser
from services.gateway.http.certificates import CertificateError, CertificateWatcher
from services.gateway.http.endpoints import VERSION
from services.gateway.http.local_call import local_call
from services.gateway.http.pages.console import Console
from services.gateway.http.routes import EndpointParts
from services.gateway.http.server import HttpServer, RootPath
from services.gateway.images.image_fetcher import ImageFetcher
from services.gateway.images.image_rows import ImageRowsClient
from services.gateway.key_file import KeyFileWatcher
from services.gateway.key_limiter import KeyLimiter
from services.gateway.metrics import gateway_collectors
from services.gateway.overflow_provider import OverflowProvider
from services.gateway.parsing.parser_choice import ParserChoice
from services.gateway.peers import GatewayPeers
from services.gateway.request_table import RequestTable
from services.gateway.response_store import ResponseStore
from services.gateway.resumable_streams import ResumableStreams
from services.gateway.videos.video_decoder import VideoDecoder
from shared import topics
from shared.actor import Actor, Tick, TopicSubscription
from shared.bus import Bus, Undelivered
from shared.bus.nats_connection import NatsOptions, connect
from shared.ids import GatewayId
from shared.messages.gateway import (
    AbortRequests,
    Deltas,
    ForgetStream,
    GatewayReply,
    GatewayRequest,
    KeepStream,
    MetricsPage,
    PromptKept,
    PromptsHeld,
    ReadMetrics,
    ReadOverview,
    RequestFailed,
    RequestPlaced,
    RequestQueued,
    RequestRejected,
    RequestsAborted,
    RowsMissing,
    StreamsGrown,
    TakeStream,
    UsageReport,
)
from shared.messages.lifecycle import Lifecycle, Phase
from shared.models.lora_registry import LoraRegistry
from shared.telemetry.metrics import ProcessMetrics

log = logging.getLogger(__name__)

CLOSE_TIMEOUT = 1.0
"""Seconds at the end for clients to read what was written."""


class Gateway(Actor):
    """Owns the open HTTP responses, their deadlines and attempts, and the tokens that clients already have."""

    service = "gateway"
    tick_every = 0.25

    def __init__(
        self,
        bus: Bus,
        config: GatewayConfig,
        *,
        listens: bool = True,
        clock: Callable[[], float] = time.monotonic,
        connect: Callable[[NatsOptions], Awaitable[Bus]] = connect,
    ) -> None:
        """Without `listens` there is no port: the owner calls `app` itself. `clock`: by which limits per minute are
        counted, in seconds. `connect`: to the federation's server, where there is one."""
        super().__init__(bus, config.instance_id())
        self._listens = listens
        self._gateway = GatewayId(self.instance)
        own_cluster = config.federation().own_cluster(self.incarnation)
        clusters = None if own_cluster is None else RemoteClusters(own_cluster, time.time())
        self.requests = _request_table(bus, self._gateway, config, clusters)
        self.federation = None if clusters is None else _federation(bus, config, clusters, self.requests, connect)
        self.metrics = gateway_collectors(self.requests.meters)
        self.peers = GatewayPeers(bus, self._gateway, ProcessMetrics(self.service, added=self.metrics))
        self.console = ConsoleFeed(bus, self.requests, self.peers)
        own = GatewayRun(self._gateway, self.incarnation)
        self.streams = ResumableStreams(bus, own, self.peers, self.requests)
        self._config = config
        self.database = _database(config)
        self._bodies = config.body_limits()
        self._parsers: list[BodyParser] = []
        self._background: list[BackgroundResponses] = []
        self.keys = KeyFileWatcher(config.api_keys, config.keys_file)
        self._limiter = KeyLimiter(bus, self._gateway, self.incarnation, clock)
        overflow = config.overflow_settings()
        self.provider = None if overflow is None else OverflowProvider(overflow)
        self.files: FileStore | None = None
        self.batch_runner: BatchRunner | None = None
        if self.database is not None:
            self.files = FileStore(self.database, config.file_limits())
            self.batch_runner = self._make_batch_runner(self.database, self.files)
        files = config.certificate_files()
        self.certificates = None if files is None else CertificateWatcher(files)
        self.app = self.make_app(config.parsers())
        self.server = HttpServer(
            RootPath(self.app, config.root_path),
            config.host,
            config.port,
            reuse_port=config.reuse_port,
            max_connections=config.max_connections,
            certificates=self.certificates,
        )
        self._ticks = 0

    def make_app(self, parsers: ParserChoice | None) -> Starlette:
        """Returns the application that answers HTTP requests. Without `parsers` chats are answered with what the model
        wrote."""
        config = self._config
        # Without a port there is one caller, whose bodies delay nobody else.
        body_parser = BodyParser(partial(self._body_context, parsers), beside=self._listens)
        self._parsers.append(body_parser)
        access = AccessControl(
            self.keys,
            self._limiter,
            share_prefixes=config.share_prefixes,
            reachable=config.reachable,
            origins=config.cors_origins,
        )
        background = self._background_responses(body_parser, access)
        pauses = PauseEndpoints(self.bus, self.requests, self.peers)
        parts = EndpointParts(
            table=self.requests,
            peers=self.peers,
            streams=self.streams,
            settings=config.stream_settings(),
            bodies=self._bodies,
            parser=body_parser,
            access=access,
            fleet=FleetEndpoints(self.bus, self.requests, self.peers, VERSION),
            pauses=pauses,
            sleeps=SleepEndpoints(self.bus, self.requests, pauses),
            batches=self._batch_endpoints(),
            message_batches=self._message_batch_endpoints(),
            sounds=AudioDecoder(config.max_audio_s, config.audio_decode_s),
            provider=self.provider,
            lora_registry=None if config.lora_registry is None else LoraRegistry(config.lora_registry),
            background=background,
            chats=self._chat_store(),
            file_store=self.files,
            console=Console(self.console) if config.console else None,
        )
        return build_app(parts, config.cors_origins)

    def _background_responses(self, parser: BodyParser, access: AccessControl) -> BackgroundResponses | None:
        limits = self._config.response_limits()
        if self.database is None or not limits.responses:
            return None
        store = ResponseStore(self.database, limits)
        background = BackgroundResponses(self._gateway, self.requests, parser, access, store)
        self._background.append(background)
        return background

    def _chat_store(self) -> ChatStore | None:
        limits = self._config.response_limits()
        return ChatStore(self.database, ChatLimits(*limits)) if self.database is not None and limits.responses else None

    def _batch_endpoints(self) -> BatchEndpoints:
        if self.database is None or self.files is None or self.batch_runner is None:
            return BatchEndpoints(None, lambda: None)
        return BatchEndpoints(BatchStore(self.database, self.files, self._config.max_batches), self.batch_runner.wake)

    def _message_batch_endpoints(self) -> MessageBatchEndpoints:
        config, timeout = self._config, self._config.stream_settings().read_timeout
        if self.database is None or self.files is None or self.batch_runner is None:
            return MessageBatchEndpoints(None, None, lambda: None, config.max_batch_lines, timeout)
        store = BatchStore(self.database, self.files, config.max_batches, prefix="msgbatch_")
        return MessageBatchEndpoints(store, self.files, self.batch_runner.wake, config.max_batch_lines, timeout)

    def _make_batch_runner(self, database: Database, files: FileStore) -> BatchRunner:
        limits = self._config.batch_limits()
        window = BatchWindow(limits.concurrency, self._engine_room)

        async def answer(request: BatchRequest, key: KeyName) -> BatchAnswer:
            answer = await local_call(self.app, "POST", request.url, request.body, request.id, key)
            return BatchAnswer(answer.status, answer.request_id, answer.body)

        def run(batch: BatchObject) -> BatchRun:
            return BatchRun(database, files, window, answer, limits, batch)

        return BatchRunner(database, f"{self._gateway}/{self.incarnation}", limits.lease, run)

    def _engine_room(self) -> EngineRoom:
        engines = self.requests.cluster.ready_engines()
        taken = sum(engine.running + engine.waiting for engine in engines)
        return EngineRoom(sum(engine.max_running for engine in engines), taken)

    def _body_context(self, parsers: ParserChoice | None, kind: BodyKind) -> BodyContext:
        """What a body that has arrived is read with."""
        cluster = self.requests.cluster
        cards, dialects = cluster.models(), None
        if parsers is not None:
            dialects = {card.name: parsers.dialect(cluster.dialect(card.name)) for card in cards}
        return BodyContext(kind, cards, self.requests.limits, dialects)

    def subscriptions(self) -> Sequence[TopicSubscription[Any]]:
        """Its inbox, what other gateways ask and report, and lifecycles of these and of what it needs."""
        usage = [TopicSubscription(topics.key_usage())] if self.keys.required else []
        return [
            *usage,
            TopicSubscription(topics.gateway_inbox(self._gateway)),
            TopicSubscription(topics.gateway_requests(self._gateway), request=True),
            TopicSubscription(topics.lifecycles("gateway")),
            *(TopicSubscription(topics.lifecycles(service)) for service in REQUIRED_SERVICES),
        ]

    async def set_up(self) -> None:
        """Starts to listen. Raises SystemExit where the port is taken, the file of keys or the certificate cannot be
        used, or the client for the overflow provider or for images is not installed."""
        if self.provider is not None:
            try:
                self.provider.check_installed()
            except ImportError:
                log.error("overflow needs aiohttp: pip install 'baton-serve[overflow]'")
                raise SystemExit(1) from None
        if self._config.image_hosts:
            try:
                ImageFetcher.check_installed()
            except ImportError:
                log.error("image_hosts needs aiohttp: pip install 'baton-serve[images]'")
                raise SystemExit(1) from None
        try:
            self.keys.load()
        except KeyFileError as error:
            log.error("cannot use the keys", extra={"file": str(self.keys.path), "error": str(error)})
            raise SystemExit(1) from None
        if self.federation is not None:
            endpoints = ClusterAdmin(self.federation).endpoints()
            await self.bus.serve_micro(ADMIN_NAME, ADMIN_VERSION, ADMIN_DESCRIPTION, endpoints)
        await self._listen()

    async def background(self) -> None:
        """Sends probes to engines, follows the files of keys and of TLS, reports what keys have used, takes part in the
        federation, clears the database, feeds the console, and takes up responses in the background that others have
        left."""
        async with asyncio.TaskGroup() as tasks:
            if self.database is not None:
                tasks.create_task(remove_expired(self.database))
            for responses in self._background:
                tasks.create_task(responses.run())
            if self.batch_runner is not None:
                tasks.create_task(self.batch_runner.run())
            if self.federation is not None:
                tasks.create_task(self.federation.run())
            if self.keys.required:
                tasks.create_task(self.keys.watch())
                tasks.create_task(self._limiter.run())
            if self.certificates is not None:
                tasks.create_task(self.certificates.watch())
            tasks.create_task(self.console.run())
            tasks.create_task(self.requests.images.open_rows.run())
            await self.requests.prober.run()

    async def _listen(self) -> None:
        if not self._listens:
            return
        try:
            if self.certificates is not None:
                self.certificates.load()
            await self.server.listen()
        except CertificateError as error:
            log.error("cannot use the certificate", extra={"error": str(error)})
            raise SystemExit(1) from None
        except OSError as error:
            log.error("cannot listen", extra={"port": self.server.port, "error": str(error)})
            raise SystemExit(1) from None
        log.info("listening", extra={"port": self.server.port})

    async def handle(self, message: Any) -> None:
        """Takes one message of the bus."""
        match message:
            case Deltas() | PromptsHeld() | RequestPlaced() | RequestQueued() | RequestRejected() | RequestFailed():
                await self.requests.handle(message)
                if self.requests.records.to_send:
                    await self.streams.replicate()
            case PromptKept():
                self.requests.record_kept(message)
            case RowsMissing(request):
                self.requests.images.open_rows.record_lost(request)
            case KeepStream() | StreamsGrown() | ForgetStream():
                await self.streams.handle(message)
            case UsageReport():
                self._limiter.record_report(message)
            case Lifecycle(service="gateway"):
                if self.peers.record_lifecycle(message, self.bus.liveness_now()):
                    await self.streams.find_keepers()
            case Lifecycle():
                await self.requests.record_lifecycle(message)
            case Tick():
                self._ticks += 1
                if self._ticks % 4 == 0:
                    self._bodies.budget.give_back_memory()
                    if self._listens:
                        await self.server.refresh_date()
                self.peers.expire(message.alive_now)
                await self.requests.tick(message.now)
                await self.streams.tick()
                if self.federation is not None:
                    await self.federation.tick()
            case Undelivered():
                await self.requests.record_undelivered(message.message)
            case _:
                raise AssertionError(message)

    async def respond(self, request: GatewayRequest) -> GatewayReply | asyncio.Future[MetricsPage]:
        """Answers another gateway. Of metrics it is a future: meanwhile the deltas of all streams are handled."""
        match request:
            case ReadMetrics():
                return asyncio.ensure_future(self.peers.read_metrics(request))
            case TakeStream():
                return await self.streams.answer(request)
            case AbortRequests():
                return RequestsAborted(tuple(await self.requests.abort(request.responses)))
            case ReadOverview():
                return overview_of(self.requests, request.max_responses)
            case _:
                assert_never(request)

    async def on_drain(self) -> None:
        """Accepts no new requests; open ones continue. Batches go to other gateways."""
        self.requests.accepting = False
        if self.batch_runner is not None:
            await self.batch_runner.stop()
        self.server.stop_listening()
        if self.federation is not None:
            await self.federation.set_accepting(False)

    async def on_undrain(self) -> None:
        """Accepts requests again."""
        self.requests.accepting = True
        if self.batch_runner is not None:
            self.batch_runner.resume()
        if self.federation is not None:
            await self.federation.set_accepting(True)
        await self._listen()

    async def tear_down(self) -> None:
        """Fails what is still open, and closes all connections."""
        for responses in self._background:
            await responses.release()
        if self.batch_runner is not None:
            await self.batch_runner.stop()
        self.requests.stop()
        self.console.stop()
        if self.federation is not None:
            await self.federation.stop()
        if self.provider is not None:
            await self.provider.close()
        await self.server.close(CLOSE_TIMEOUT)
        if self.database is not None:
            await self.database.close()
        for parser in self._parsers:
            await parser.close()

    def is_idle(self) -> bool:
        """Whether no response is open, and no request of another cluster."""
        if self.federation is not None and len(self.federation.relayed):
            return False
        return self.requests.idle and (self.provider is None or self.provider.idle)

    def target_phase(self) -> Phase:
        """`ready` while requests can be served."""
        return "ready" if self.requests.not_serving() is None else "starting"

    def load(self) -> int:
        """Number of open requests."""
        return len(self.requests)


def _request_table(
    bus: Bus, gateway: GatewayId, config: GatewayConfig, clusters: RemoteClusters | None
) -> RequestTable:
    """With what makes rows of images, videos and sounds in requests."""
    media = ImageRowsClient(
        bus,
        ImageFetcher(config.image_hosts, config.image_fetch_s),
        VideoDecoder(config.video_decode_s),
        AudioDecoder(config.max_audio_s, config.audio_decode_s).whole,
    )
    streams = StreamRecords(config.resumable_memory, config.resume_s, config.request_s)
    return RequestTable(
        *(bus, gateway, config.policy(), config.limits(), config.max_open_requests), streams, clusters, media
    )


def _federation(
    bus: Bus,
    config: GatewayConfig,
    clusters: RemoteClusters,
    requests: RequestTable,
    connect: Callable[[NatsOptions], Awaitable[Bus]],
) -> Federation:
    options = config.federation().nats_options()
    drain_file = DrainFile(config.federation_state)
    return Federation(clusters, requests, lambda: connect(options), bus.liveness_now, drain_file=drain_file)


def _database(config: GatewayConfig) -> Database | None:
    """Raises SystemExit where its library is not installed."""
    try:
        return config.open_database()
    except ImportError as error:
        log.error("the database needs a library: pip install 'baton-serve[database]'", extra={"error": str(error)})
        raise SystemExit(1) from None
