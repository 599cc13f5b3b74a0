"""The scheduler's shell: bus in, core asked, bus out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, assert_never

from services.scheduler import metrics
from services.scheduler.core.events import (
    AskStore,
    DetokenizerGone,
    Event,
    GatewayGone,
    GiveUp,
    NotTaken,
    Output,
    PassOn,
    PeerChanged,
    RankProgress,
    Relay,
    ReleaseLease,
    SendPlan,
    SendTokens,
    StoreGone,
    StoreHere,
    TellGateway,
    TimePassed,
    WorkersLost,
)
from services.scheduler.core.invariants import check
from services.scheduler.core.limits import Limits
from services.scheduler.core.ranks import Ranks, Unequal
from services.scheduler.core.site import Site
from services.scheduler.journal import DecisionJournal, EngineStart, JournalSettings
from services.scheduler.kv_publisher import KvPublisher
from services.scheduler.store_questions import StoreQuestions
from shared import topics
from shared.actor import Actor, Hears, Tick
from shared.bus import Bus, PayloadTooLarge, Undelivered
from shared.ids import DetokenizerId, EngineId, GatewayId, InstanceId, NodeId, new_incarnation
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import Failed, Placed, Rejected
from shared.messages.kv_events import DumpRequest
from shared.messages.kvstore import Owner
from shared.messages.lifecycle import EngineReport, Lifecycle, Phase, Role, Service
from shared.messages.scheduler import Generate, Probe, ProbeReply, StepFinished
from shared.messages.worker import StepPlan
from shared.registry import Gone, Registry

log = logging.getLogger(__name__)

CHECK_EVERY = 30.0
"""Seconds between two looks at the invariants of an idle engine: they take a while on a large pool."""

OTHERS_SILENCE = 10.0
"""Seconds. That a detokenizer is gone shows at once, by messages that come back; for a gateway that is gone we only
compute in vain. So neither need be declared dead early for being slow."""

ALARM_RESOLUTION = 0.001
"""Seconds: timers are no finer."""

HEEDED: tuple[Service, ...] = ("worker", "scheduler", "detokenizer", "gateway", "kvstore")
"""Whose lives matter here."""


class EngineWedged(Exception):
    """A step did not end in time. Every request was failed; the process ends, and its supervisor starts a new one."""


class SchedulerActor(Actor):
    """Owns the core that owns one engine's requests. The engine's id is this instance's name."""

    service = "scheduler"
    tick_every = 0.5

    def __init__(
        self,
        bus: Bus,
        instance: InstanceId,
        limits: Limits,
        *,
        world_size: int | None = None,
        role: Role = "mixed",
        node: NodeId | None = None,
        journal: JournalSettings | None = None,
    ) -> None:
        super().__init__(bus, instance)
        self.engine_id = EngineId(instance)
        site = Site(role, node, Owner(instance, self.incarnation))
        start = EngineStart(self.engine_id, new_incarnation(), limits, site)
        self.core = start.core()
        self._journal = None if journal is None else DecisionJournal(journal, start, self.core)
        self._decide = self.core.handle if self._journal is None else self._journal.handle
        self._store = StoreQuestions(bus, node, self._tell) if node is not None else None
        self._ranks = Ranks(self.engine_id, world_size)
        self._others = Registry(OTHERS_SILENCE)
        """Gateways, detokenizers, other engines and the store."""
        self._gauges = metrics.EngineGauges()
        self._kv = KvPublisher(bus, instance)
        self._unequal: Unequal | None = None
        self._outbox: deque[Output] = deque()
        self._sending = False
        self._alarm = asyncio.Event()
        self._alarm_at: float | None = None
        self._worked_since_check = False
        self._checked_at = 0.0

    def hears(self) -> Sequence[Hears[Any]]:
        return [
            Hears(topics.engine_requests(self.engine_id), intake=True),
            Hears(topics.engine_results(self.engine_id)),
            Hears(topics.engine_control(self.engine_id)),
            Hears(topics.engine_probes(self.engine_id), asked=True),
            Hears(topics.kv_dump_requests(self.instance)),
            *(Hears(topics.lifecycles(service)) for service in HEEDED),
        ]

    async def handle(self, message: Any) -> None:
        match message:
            case Lifecycle():
                await self._lifecycle(message)
            case Tick(_, alive_now):
                await self._tick(alive_now)
            case Undelivered():
                await self._returned(message)
            case DumpRequest():
                self._kv.asked(message)
            case _:
                await self._tell(message)

    async def answer(self, question: Probe) -> ProbeReply:
        return self.core.probe(question.request, question.attempt)

    async def tear_down(self) -> None:
        await self._tell(WorkersLost("the engine was stopped"))
        if self._journal is not None:
            self._journal.close()

    def is_idle(self) -> bool:
        return self.core.idle

    def wanted_phase(self) -> Phase:
        return "ready" if self.core.serving is not None else "starting"

    def load(self) -> int:
        return len(self.core.requests)

    def engine_report(self) -> EngineReport | None:
        return self.core.report()

    async def _tell(self, event: Event) -> None:
        started = time.perf_counter()
        outputs = self._decide(event, self.bus.liveness_now())
        if isinstance(event, StepFinished):
            self._worked_since_check = True
            metrics.STEPS.inc()
            metrics.DECISION.observe(time.perf_counter() - started)
        elif isinstance(event, Generate):
            metrics.PREDICTED_CACHED.inc(event.predicted_cached)
        self._outbox += outputs
        self._kv.look(self.core)
        self._set_alarm()
        if not self._sending:
            await self._empty_outbox()

    async def _empty_outbox(self) -> None:
        """Sends in order, whoever put it in: inbox and alarm are two tasks, and a detokenizer counts our messages."""
        self._sending = True
        try:
            while self._outbox:
                await self._send(self._outbox.popleft())
        finally:
            self._sending = False

    def _set_alarm(self) -> None:
        """Rings when the core wants to plan ahead; soon after at the latest, as the bus's clock may stand still."""
        due = self.core.plan_due
        if due is None or self._alarm_at == due:
            return
        self._alarm_at = due
        delay = max(ALARM_RESOLUTION, due - self.bus.liveness_now())
        asyncio.get_running_loop().call_later(delay, self._alarm.set)

    async def background(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._kv.run())
            tasks.create_task(self._plan_when_due())
            if self._store is not None:
                tasks.create_task(self._store.run())

    async def _plan_when_due(self) -> None:
        while True:
            await self._alarm.wait()
            self._alarm.clear()
            self._alarm_at = None
            await self._tell(TimePassed())

    async def _send(self, output: Output) -> None:
        match output:
            case SendPlan(plan):
                if plan.work:
                    metrics.BATCH_TOKENS.observe(sum(work.count for work in plan.work))
                await self.bus.publish(topics.engine_steps(self.engine_id), plan, confirm=True)
            case SendTokens(detokenizer, batch):
                metrics.note_batch(batch)
                _log_batch(batch)
                await self.bus.publish(topics.detokenizer_tokens(detokenizer), batch, confirm=True)
            case TellGateway(gateway, message):
                _note_word(message)
                await self.bus.publish(topics.gateway_inbox(gateway), message, confirm=True)
            case AskStore() | ReleaseLease() | PassOn() | Relay():
                await self._send_aside(output)
            case GiveUp(reason):
                await self.bus.flush()
                raise EngineWedged(reason)
            case _:
                assert_never(output)

    async def _send_aside(self, output: AskStore | ReleaseLease | PassOn | Relay) -> None:
        """To the node's store, and to other engines."""
        node = self.core.site.node
        match output:
            case AskStore():
                assert self._store is not None, "only with a node there is a store to ask"
                self._store.ask(output)
            case ReleaseLease(release):
                assert node is not None, "only with a node there are leases"
                await self.bus.publish(topics.kvstore_releases(node), release)
            case PassOn():
                await self._pass_on(output)
            case Relay(engine, message):
                await self.bus.publish(topics.engine_control(engine), message)
            case _:
                assert_never(output)

    async def _pass_on(self, output: PassOn) -> None:
        try:
            await self.bus.publish(topics.engine_requests(output.engine), output.generate, confirm=True)
        except PayloadTooLarge:
            await self._tell(NotTaken(output.generate, output.engine))

    # ---- who lives

    async def _lifecycle(self, life: Lifecycle) -> None:
        now = self.bus.liveness_now()
        match life.service:
            case "worker":
                await self._worker_heard(life, now)
            case "gateway" | "detokenizer":
                gone = self._others.heard(life, now)
                if gone is not None:
                    await self._gone(gone)
            case "scheduler" if life.instance != self.instance:
                await self._peer_heard(life, now)
            case "kvstore" if life.store is not None and life.store.node == self.core.site.node:
                await self._store_heard(life, now)
            case _:
                pass

    async def _peer_heard(self, life: Lifecycle, now: float) -> None:
        self._others.heard(life, now)
        await self._peer(EngineId(life.instance), takes=life.phase == "ready")

    async def _peer(self, engine: EngineId, *, takes: bool) -> None:
        if self.core.peers.take_over(engine) != takes:
            await self._tell(PeerChanged(engine, takes))

    async def _store_heard(self, life: Lifecycle, now: float) -> None:
        gone = self._others.heard(life, now)
        if life.phase == "ready":
            await self._tell(StoreHere(life.incarnation))
        elif gone is not None:
            await self._gone(gone)

    async def _worker_heard(self, life: Lifecycle, now: float) -> None:
        await self._workers_lost(self._ranks.heard(life, now))
        report = life.worker
        if self.core.serving is None:
            await self._assemble()
        elif report is not None and self._ranks.is_member(life):
            progress = RankProgress(report.rank, report.epoch, report.received, report.published, report.transfers)
            await self._tell(progress)

    async def _assemble(self) -> None:
        workers = self._ranks.assemble()
        if isinstance(workers, Unequal):
            if workers != self._unequal:
                log.error("ranks differ", extra={"cards": workers.difference})
            self._unequal = workers
        elif workers is not None:
            log.info("workers ready", extra={"blocks": workers.num_blocks, "model": workers.card.name})
            await self._tell(workers)

    async def _workers_lost(self, reason: str | None) -> None:
        if reason is not None and self.core.serving is not None:
            metrics.EPOCHS.inc()
            log.error("workers lost", extra={"reason": reason})
            await self._tell(WorkersLost(reason))

    async def _gone(self, gone: Gone) -> None:
        log.warning("gone", extra={"instance_gone": gone.last.instance, "reason": gone.reason})
        match gone.last.service:
            case "gateway":
                await self._tell(GatewayGone(GatewayId(gone.last.instance)))
            case "kvstore":
                await self._tell(StoreGone())
            case "scheduler":
                await self._peer(EngineId(gone.last.instance), takes=False)
            case _:
                await self._tell(DetokenizerGone(DetokenizerId(gone.last.instance)))

    async def _returned(self, undelivered: Undelivered) -> None:
        match undelivered.message:
            case StepPlan(epoch=epoch):
                serving = self.core.serving
                if serving is not None and serving.steps.epoch == epoch:
                    self._ranks.forget()
                    await self._workers_lost("no worker takes plans")
            case TokenBatch():
                detokenizer = undelivered.topic.subject.split(".")[1]
                await self._tell(DetokenizerGone(DetokenizerId(detokenizer)))
            case Generate():
                engine = undelivered.topic.subject.split(".")[1]
                await self._tell(NotTaken(undelivered.message, EngineId(engine)))
            case _:
                log.info("undelivered", extra={"subject": undelivered.topic.subject})

    # ---- time

    async def _tick(self, alive_now: float) -> None:
        await self._workers_lost(self._ranks.expire(alive_now))
        for gone in self._others.expire(alive_now):
            await self._gone(gone)
        await self._tell(TimePassed())
        self._gauges.show(self.core)
        if self.is_idle() and self._worked_since_check and alive_now - self._checked_at > CHECK_EVERY:
            self._checked_at, self._worked_since_check = alive_now, False
            check(self.core)


def _log_batch(batch: TokenBatch) -> None:
    """A request's life here, to be followed by its id."""
    for opened in batch.opened:
        extra = {"prompt_tokens": opened.prompt_tokens, "cached_tokens": opened.cached_tokens}
        log.info("started", extra={"request": opened.request, "attempt": opened.attempt, **extra})
    for entry in batch.entries:
        if entry.finish is not None:
            life = {"request": entry.request, "attempt": entry.attempt, "finish": entry.finish}
            log.info("finished", extra={**life, "output_tokens": entry.position + len(entry.tokens)})
    for abandoned in batch.abandoned:
        log.info("given up", extra={"request": abandoned.request, "attempt": abandoned.attempt})


def _note_word(message: Rejected | Failed | Placed) -> None:
    if isinstance(message, Placed):
        extra = {"request": message.request, "attempt": message.attempt, "engine": message.engine}
        log.info("handed over", extra=extra)
        return
    kind, reason = (message.kind, message.message) if isinstance(message, Rejected) else ("failed", message.reason)
    metrics.REFUSED.labels(kind).inc()
    extra = {"request": message.request, "attempt": message.attempt, "kind": kind, "reason": reason}
    log.info("refused", extra=extra)
