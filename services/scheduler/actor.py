"""The scheduler's actor: messages in from the bus, decided by the core, its outputs out to the bus."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, assert_never

from msgspec.structs import replace

from services.scheduler import metrics
from services.scheduler.connector_host import ConnectorHost, SchedulerConnector
from services.scheduler.core.events import (
    DetokenizerGone,
    Event,
    GatewayGone,
    HandOverRefused,
    LorasChanged,
    Output,
    PeerChanged,
    RankProgress,
    StoreGone,
    StoreReady,
    TimePassed,
    WorkersLost,
)
from services.scheduler.core.invariants import check
from services.scheduler.core.limits import EngineLimits, EngineRole
from services.scheduler.core.picture import engine_picture
from services.scheduler.core.transfer.prefill_pulls import PrefillPulls
from services.scheduler.engine_sleep import EngineSleep
from services.scheduler.journal import DecisionJournal, EngineStart, JournalSettings
from services.scheduler.kv_publisher import EngineKvPublisher
from services.scheduler.media_intake import MediaIntake, RowsMemory
from services.scheduler.output_sender import OutputSender
from services.scheduler.request_log import RequestLog, log_health
from services.scheduler.store_requests import StoreRequests
from services.scheduler.worker_ranks import UnequalRanks, UnusableRanks, WorkerRanks
from shared import topics
from shared.actor import Actor, Tick, TopicSubscription
from shared.bus import Bus, Undelivered
from shared.ids import DetokenizerId, EngineId, GatewayId, InstanceId, NodeId, new_incarnation
from shared.messages.coordinator import PullPrefills
from shared.messages.detokenizer import TokenBatch
from shared.messages.encoder import ReadRows, RowsPiece
from shared.messages.kv_events import KvDumpRequest, PrefixCacheReset, ResetPrefixCache
from shared.messages.kvstore import LeaseOwner
from shared.messages.lifecycle import (
    EngineHealth,
    EngineReport,
    HeartbeatInterval,
    Lifecycle,
    Phase,
    Role,
    Service,
    SleepReport,
)
from shared.messages.model_card import ModelCard
from shared.messages.scheduler import (
    Cancel,
    GenerateRequest,
    PauseGeneration,
    Probe,
    ProbeReply,
    ReadPauseState,
    ReadPicture,
    ReadSleepState,
    ResumeGeneration,
    SchedulerAnswer,
    SchedulerQuestion,
    SleepEngine,
    SleepState,
    StepFinished,
    WakeEngine,
)
from shared.messages.worker import PingRank, SleepLevel, StepPlan
from shared.registry import InstanceGone, Registry
from shared.telemetry.metrics import PublishedTotals
from shared.telemetry.tracing import OpenSpan

log = logging.getLogger(__name__)

CHECK_INTERVAL = 30.0
"""Seconds between two looks at the invariants of an idle engine: they take a while on a large pool."""

PEER_TIMEOUT = 10.0
"""Seconds. That a detokenizer is gone shows at once, by messages that come back; for a gateway that is gone we only
compute in vain. So neither need be declared dead early for being slow."""

ROOM_REPORT_SECONDS = 0.1
"""Between two reports that nothing waits any more."""

ALARM_RESOLUTION = 0.001
"""Seconds: timers are no finer."""

WATCHED_SERVICES: tuple[Service, ...] = ("detokenizer", "gateway")
"""What an engine gives requests up for, once it is gone."""


class SchedulerActor(Actor):
    """Owns the core that owns one engine's requests. The engine's id is this instance's name."""

    service = "scheduler"
    tick_every = 0.5

    def __init__(
        self,
        bus: Bus,
        instance: InstanceId,
        limits: EngineLimits,
        *,
        world_size: int | None = None,
        role: Role = "mixed",
        node: NodeId | None = None,
        connector: SchedulerConnector | None = None,
        journal: JournalSettings | None = None,
        standby: bool = False,
        pulls: bool = False,
        rows: RowsMemory | None = None,
    ) -> None:
        super().__init__(bus, instance)
        self.standby = standby
        self.engine_id = EngineId(instance)
        engine_role = EngineRole(role, node, LeaseOwner(instance, self.incarnation), connector and connector.use)
        start = EngineStart(self.engine_id, new_incarnation(), limits, engine_role)
        self.core = start.core()
        self._journal = None if journal is None else DecisionJournal(journal, start, self.core)
        self._handle_event = self.core.handle if self._journal is None else self._journal.handle
        self._store = StoreRequests(bus, node, self._decide) if node is not None else None
        self._media = MediaIntake(bus, self.engine_id, rows or RowsMemory(), self._take_request)
        self._connector = connector and ConnectorHost(connector.connector, limits.store_deadline, self._decide)
        self._request_log = RequestLog(self.engine_id)
        self._sender = OutputSender(
            bus, self.engine_id, node, self._store, self._connector, self._request_log, self._decide
        )
        self._ranks = WorkerRanks(self.engine_id, world_size, role)
        self._others = Registry(PEER_TIMEOUT)
        """Gateways, detokenizers, other engines and the store."""
        self._pulls = PrefillPulls(limits) if pulls and role == "prefill" else None
        self._totals = PublishedTotals()
        self._kv = EngineKvPublisher(bus, instance)
        self._refused_ranks: UnequalRanks | UnusableRanks | None = None
        self._outbox: deque[Output] = deque()
        self._sending = False
        self._alarm = asyncio.Event()
        self._alarm_at: float | None = None
        self._loras = LorasChanged(())
        """As the core knows them."""
        self._sleep = EngineSleep()
        self._model: ModelCard | None = None
        """What the workers serve, or served when there were any."""
        self._had_waiting = False
        """Whether requests waited since the last report that none does."""
        self._room_reported_at = -math.inf
        self._check_due = False
        self._checked_at = 0.0
        self._health = self.core.health.suspicion.report
        """As it was last published."""

    def subscriptions(self) -> Sequence[TopicSubscription[Any]]:
        """Requests, results of the workers, control, probes, dumps of block events, and lifecycles."""
        return [
            TopicSubscription(topics.engine_requests(self.engine_id), intake=True),
            TopicSubscription(topics.engine_results(self.engine_id)),
            TopicSubscription(topics.engine_control(self.engine_id)),
            TopicSubscription(topics.engine_probes(self.engine_id), request=True),
            TopicSubscription(topics.kv_dump_requests(self.instance)),
            TopicSubscription(topics.kept_rows(self.instance), request=True),
            TopicSubscription(topics.rank_lifecycles(self.engine_id)),
            *(TopicSubscription(topics.lifecycles(service)) for service in self._watched_services()),
        ]

    def _watched_services(self) -> Sequence[Service]:
        """Of other engines only those hear that hand requests over to them, and of KV stores those that have one: every
        engine costs each of them two messages a second."""
        role = self.core.role
        stores: Sequence[Service] = () if role.node is None else ("kvstore",)
        peers: Sequence[Service] = ("scheduler",) if role.kind == "prefill" else ()
        return [*WATCHED_SERVICES, *stores, *peers]

    async def handle(self, message: Any) -> None:
        """Passes a message to the core, and sends the core's outputs. Raises EngineWedged."""
        match message:
            case Lifecycle():
                await self._handle_lifecycle(message)
            case Tick(_, alive_now):
                await self._tick(alive_now)
            case Undelivered():
                await self._record_undelivered(message)
            case KvDumpRequest():
                self._kv.request_dump(message)
            case GenerateRequest():
                if (held := self._media.take(message)) is not None:
                    await self._take_request(held)
            case Cancel():
                self._media.cancel(message.request)
                await self._decide(message)
            case StepFinished():
                await self._decide(message)
                await self._report_room()
            case _:
                await self._decide(message)

    async def _take_request(self, generate: GenerateRequest) -> None:
        if generate.generation.suspect_until is not None:
            await self.isolate(generate.generation.request)  # for as long as it is read
        await self._decide(generate)

    async def _report_room(self) -> None:
        """Reports at once that the last waiting request has begun: of API keys coordinators send no more than a few
        ahead, and places would stay free until the next report."""
        now = self.bus.liveness_now()
        if self.core.waiting:
            self._had_waiting = True
        elif self._had_waiting and now - self._room_reported_at >= ROOM_REPORT_SECONDS:
            self._had_waiting, self._room_reported_at = False, now
            await self.publish_lifecycle()

    async def respond(self, request: SchedulerQuestion | ReadRows) -> SchedulerAnswer | RowsPiece:
        """An attempt's state; how many blocks were forgotten; whether the engine rests or sleeps; what it holds."""
        match request:
            case ReadRows():
                return self._media.piece(request)
            case Probe() if request.request in self._media:
                return ProbeReply("waiting", 0)
            case Probe():
                return self.core.probe(request.request, request.attempt)
            case ResetPrefixCache():
                blocks = self.core.named_blocks
                await self._decide(request)
                return PrefixCacheReset(blocks)
            case PauseGeneration() | ResumeGeneration():
                log.info("paused or resumed", extra={"request": type(request).__name__, "load": self.core.load})
                await self._decide(request)
                await self.publish_lifecycle()  # before the answer: a paused engine is not to be taken for a hung one
                return self.core.pause_state()
            case ReadPauseState():
                return self.core.pause_state()
            case SleepEngine() if (others := self._ranks.data_parallel_size) > 1:
                return SleepState(None, 0, f"{self.instance}: {others} engines share experts, and need its ranks awake")
            case SleepEngine() | WakeEngine():
                await self._decide_sleep(None if isinstance(request, WakeEngine) else request.level)
                return self._sleep.state(self._ranks.world_size, serves=self.core.serves)
            case ReadSleepState():
                return self._sleep.state(self._ranks.world_size, serves=self.core.serves)
            case ReadPicture():
                return engine_picture(self.core)
            case _:
                assert_never(request)

    async def _decide_sleep(self, level: SleepLevel | None) -> None:
        """An engine that sleeps has no workers: what it holds is tried again elsewhere, or when it serves again."""
        log.info("sleep" if level else "wake up", extra={"level": level, "load": self.core.load})
        order = self._sleep.decide(level)
        if level is not None:
            self._ranks.forget()
            await self._lose_workers(WorkersLost("the engine was put to sleep"))
        elif self.core.paused is not None:
            await self._decide(ResumeGeneration())
        await self.bus.publish(topics.rank_orders(self.engine_id), order)
        await self.publish_lifecycle()

    def set_interval(self, interval: HeartbeatInterval) -> None:
        """As `Actor` has it: changes of blocks are gathered for as long as the fleet's size asks for."""
        self._kv.set_interval(interval)

    async def tear_down(self) -> None:
        """Fails what is left, so that it is tried again elsewhere."""
        await self._decide(WorkersLost("the engine was stopped"))
        self._media.close()
        if self._connector is not None:
            await self._connector.close()
        if self._journal is not None:
            self._journal.close()

    def is_idle(self) -> bool:
        """Whether no request is in hand, and no block is on its way to the store."""
        return self.core.idle and not self._media

    def target_phase(self) -> Phase:
        """Ready while there are workers, once they have said what later canaries are compared with."""
        return "ready" if self.core.serves else "starting"

    def load(self) -> int:
        """Requests that have not ended."""
        return self.core.load

    def engine_report(self) -> EngineReport | None:
        """The engine's load, for coordinators; None while there are no workers."""
        report = self.core.report()
        return None if report is None else replace(report, figures=self._request_log.figures())

    def open_spans(self, trace_id: str) -> list[OpenSpan]:
        """The stages that requests of a trace are in."""
        return self._request_log.open_stages(trace_id)

    def sleep_report(self) -> SleepReport | None:
        """Whether the engine sleeps."""
        return self._sleep.report(self._model)

    async def _decide(self, event: Event) -> None:
        """Passes the event to the core, sends its outputs in the order of decisions, and sets a timer for its next
        plan. A plan leaves before all that nobody waits for."""
        started = time.perf_counter()
        outputs = self._handle_event(event, self.bus.liveness_now())
        decided = time.perf_counter() - started
        if isinstance(event, GenerateRequest):
            self._request_log.arrived(event, self.core.requests)
        if self.core.isolated != self.isolated:
            await self.isolate(self.core.isolated)
        self._outbox += outputs
        await self._send_outbox()
        if isinstance(event, StepFinished):
            self._check_due = True
            metrics.STEPS.inc()
            metrics.DECISION.observe(decided)
        self._kv.update(self.core)
        if (health := self.core.health.suspicion.report) != self._health:
            await self._publish_health(health)
        if self._pulls is not None:
            await self._pull_prefills(self._pulls)
        due = self.core.plan_due
        if due is not None and self._alarm_at != due:  # it may fire a little late, as the bus's clock may be paused
            self._alarm_at = due
            delay = max(ALARM_RESOLUTION, due - self.bus.liveness_now())
            asyncio.get_running_loop().call_later(delay, self._alarm.set)

    async def _send_outbox(self) -> None:
        """Sends what was decided, in that order; nothing where another task does so already."""
        if self._sending:  # inbox and alarm are two tasks, and a detokenizer counts our messages
            return
        self._sending = True
        try:
            while self._outbox:
                await self._sender.send(self._outbox.popleft())
        finally:
            self._sending = False

    async def _pull_prefills(self, pulls: PrefillPulls) -> None:
        """Asks for prompts, while it may be given any."""
        wanted = pulls.due(self.core.requests.values(), self.bus.liveness_now()) if self.core.serves else None
        if wanted is not None:
            await self.bus.publish(topics.prefill_pulls(), PullPrefills(self.engine_id, wanted))

    async def _publish_health(self, health: EngineHealth) -> None:
        """At once, so that no request comes meanwhile that had better gone elsewhere."""
        before, self._health = self._health, health
        log_health(before, health)
        await self.publish_lifecycle()

    async def background(self) -> None:
        """Publishes block events, plans when that is due, and carries requests to the store, until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._kv.run())
            tasks.create_task(self._plan_when_due())
            tasks.create_task(self._media.run())
            if self._store is not None:
                tasks.create_task(self._store.run())
            if self._connector is not None:
                tasks.create_task(self._connector.run())

    async def _plan_when_due(self) -> None:
        while True:
            await self._alarm.wait()
            self._alarm.clear()
            self._alarm_at = None
            await self._decide(TimePassed())

    # ---- lifecycles of other processes

    async def _handle_lifecycle(self, life: Lifecycle) -> None:
        now = self.bus.liveness_now()
        match life.service:
            case "worker":
                await self._record_worker_lifecycle(life, now)
            case "gateway" | "detokenizer":
                gone = self._others.record_lifecycle(life, now)
                if gone is not None:
                    await self._record_gone(gone)
            case "scheduler" if life.instance != self.instance:
                await self._record_peer_lifecycle(life, now)
            case "kvstore" if life.store is not None and life.store.node == self.core.role.node:
                await self._record_store_lifecycle(life, now)
            case _:
                pass

    async def _record_peer_lifecycle(self, life: Lifecycle, now: float) -> None:
        self._others.record_lifecycle(life, now)
        await self._record_peer(EngineId(life.instance), takes=life.phase == "ready")

    async def _record_peer(self, engine: EngineId, *, takes: bool) -> None:
        if self.core.takes_over(engine) != takes:
            await self._decide(PeerChanged(engine, takes))

    async def _record_store_lifecycle(self, life: Lifecycle, now: float) -> None:
        gone = self._others.record_lifecycle(life, now)
        if life.phase == "ready":
            await self._decide(StoreReady(life.incarnation))
        elif gone is not None:
            await self._record_gone(gone)

    async def _record_worker_lifecycle(self, life: Lifecycle, now: float) -> None:
        await self._lose_workers(self._ranks.record_lifecycle(life, now))
        if (order := self._sleep.record_lifecycle(life)) is not None:
            await self.bus.publish(topics.rank_orders(self.engine_id), order)
        report = life.worker
        if self.core.epoch is None:
            if self._sleep.level is None:
                await self._assemble()
        elif report is not None and self._ranks.is_member(life):
            progress = RankProgress(report.rank, report.epoch, report.received, report.published, report.transfers)
            await self._decide(progress)
            await self._follow_loras()

    async def _follow_loras(self) -> None:
        """Says at once which adapters have come or gone: operators wait for it."""
        if (loras := self._ranks.loras()) != self._loras:
            self._loras = loras
            await self._decide(loras)
            await self.publish_lifecycle()

    async def _assemble(self) -> None:
        workers = self._ranks.assemble()
        if isinstance(workers, UnequalRanks | UnusableRanks):
            if workers != self._refused_ranks and isinstance(workers, UnequalRanks):
                log.error("ranks differ", extra={"cards": workers.difference})
            elif workers != self._refused_ranks and isinstance(workers, UnusableRanks):
                log.error("cannot serve", extra={"reason": workers.reason})
            self._refused_ranks = workers
        elif workers is not None:
            log.info("workers ready", extra={"blocks": workers.num_blocks, "model": workers.card.name})
            metrics.VLLM_NAMES.added = {"model_name": workers.card.name, "engine": self.engine_id}
            if self._connector is not None:
                self._connector.set_layout(workers.cache_format, workers.world_size, workers.card.block_size)
            self._model = workers.card
            await self._decide(workers)
            self._loras = LorasChanged(workers.card.loras)
            await self._follow_loras()

    async def _lose_workers(self, lost: WorkersLost | None) -> None:
        if lost is not None and self.core.epoch is not None:
            metrics.EPOCHS.inc()
            log.error("workers lost", extra={"reason": lost.reason})
            await self._decide(lost)

    async def _record_gone(self, gone: InstanceGone) -> None:
        log.warning("instance gone", extra={"instance_gone": gone.last.instance, "reason": gone.reason})
        match gone.last.service:
            case "gateway":
                await self._decide(GatewayGone(GatewayId(gone.last.instance)))
            case "kvstore":
                await self._decide(StoreGone())
            case "scheduler":
                await self._record_peer(EngineId(gone.last.instance), takes=False)
            case _:
                await self._decide(DetokenizerGone(DetokenizerId(gone.last.instance)))

    async def _record_undelivered(self, undelivered: Undelivered) -> None:
        match undelivered.message:
            case StepPlan(epoch=epoch, step=step):
                if self.core.epoch == epoch:
                    self._ranks.record_undelivered_plan(epoch, step, self.bus.liveness_now())
            case TokenBatch():
                detokenizer = undelivered.topic.subject.split(".")[1]
                await self._decide(DetokenizerGone(DetokenizerId(detokenizer)))
            case GenerateRequest():
                engine = undelivered.topic.subject.split(".")[1]
                await self._decide(HandOverRefused(undelivered.message, EngineId(engine)))
            case _:
                log.info("message not delivered", extra={"subject": undelivered.topic.subject})

    # ---- time

    async def _tick(self, alive_now: float) -> None:
        lost = self._ranks.expire(alive_now, self.core.epoch)
        await self._lose_workers(lost)
        asks = self._ranks.ping_is_due(alive_now, self.core.step_awaited_since)
        if asks or lost is not None:  # behind a loss those that live say so, and need not be waited for
            await self.bus.publish(topics.rank_orders(self.engine_id), PingRank())
        for gone in self._others.expire(alive_now):
            await self._record_gone(gone)
        await self._decide(TimePassed())
        self._media.release_ended(self.core.requests)
        metrics.show(self.core.snapshot(), self._totals)
        if self.is_idle() and self._check_due and alive_now - self._checked_at > CHECK_INTERVAL:
            self._checked_at, self._check_due = alive_now, False
            check(self.core)
