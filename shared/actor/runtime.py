"""Runs an actor: subscriptions, inbox, heartbeat, drain and stop. The shell around every service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from shared.actor.actor import Actor, LifecycleTable, PendingRequest, Tick, TopicSubscription
from shared.actor.heartbeat import Heartbeat
from shared.blocks import DEFAULT_BLOCK_SIZE
from shared.bus import Bus, BusError, Subscription, Undelivered
from shared.ids import Incarnation, InstanceId
from shared.messages.gateway import ReadSpans, SpansFound
from shared.messages.lifecycle import (
    HEARTBEAT_SECONDS,
    KEEP_ALIVE_SECONDS,
    Drain,
    HeartbeatInterval,
    InstanceControl,
    Lifecycle,
    LifecycleRequest,
    NameClaim,
    NameHolder,
    Phase,
    Standby,
    Undrain,
)
from shared.protocol import MIN_PROTOCOL, PROTOCOL, incompatibility, other_block_size
from shared.reliability.recent import RecentEntries
from shared.telemetry.metrics import HANDLED, HEARTBEAT_AGE, INBOX, PHASE, UNDELIVERED
from shared.telemetry.startup import STARTUP
from shared.telemetry.tracing import TRACING
from shared.topics import heartbeat_interval, instance_control, lifecycle_requests, name_claims, span_requests
from shared.traces.request_trace import RECORDERS, spans_found

log = logging.getLogger(__name__)

CLAIM_TIMEOUT = 1.0
IDLE_POLL = 0.02
MAX_PAUSE_REPORTED = 1.0
MAX_INCOMPATIBLE = 1024
"""Incompatible processes that are remembered, so that each is logged once."""


class NameTaken(Exception):
    """Another process has this one's name on the bus; the text names it."""

    def __init__(self, instance: InstanceId, holder: NameHolder) -> None:
        super().__init__(
            f"{instance}: process {holder.pid} on {holder.host} has this name already; give another --instance, or "
            "another --namespace to a second stack on the same bus"
        )


class ActorRuntime:
    """Owns an actor's inbox, phase and subscriptions. `run` returns when the actor has stopped."""

    def __init__(
        self,
        actor: Actor,
        *,
        drain_timeout: float = 30.0,
        metrics_port: int | None = None,
        when_set_up: Callable[[], None] = lambda: None,
        keep_alive: float = KEEP_ALIVE_SECONDS,
        block_size: int = DEFAULT_BLOCK_SIZE,
    ) -> None:
        self.actor = actor
        self._block_size = block_size
        self._when_set_up = when_set_up
        self.incarnation = actor.incarnation
        self._bus: Bus = actor.bus
        self._drain_timeout = drain_timeout
        self._metrics_port = metrics_port
        self._table = LifecycleTable()
        self._inbox: asyncio.Queue[Any] = asyncio.Queue(actor.inbox_limit)
        self._intake: list[Subscription] = []
        self._internal: list[Subscription] = []
        self._draining = False
        self._standby = actor.standby
        self._busy = False
        self._progress = 0
        self._started = time.time()
        self._beat = Heartbeat(keep_alive)
        self._stop = asyncio.Event()
        self._handled = HANDLED.labels(actor.service)
        self._incompatible: RecentEntries[Incarnation, str] = RecentEntries(MAX_INCOMPATIBLE)
        """Processes whose lifecycle messages are dropped, and why."""
        actor.publish_lifecycle = self._publish_lifecycle
        actor.stop = self.stop

    @property
    def phase(self) -> Phase:
        """The actor's present phase, as published last."""
        return self._table.phase

    def stop(self) -> None:
        """Starts a drain that ends the actor; `run` returns when both are done. Safe to call again."""
        self._stop.set()

    async def run(self) -> None:
        """Serves until `stop`. Raises NameTaken. A bug of the actor publishes `failed` and is raised again."""
        await self._claim_name()
        INBOX.set_function(self._inbox.qsize)
        self._bus.on_undelivered(self._receive_undelivered)
        await self._subscribe_all()
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._ask_who_is_there()
                await self._publish_lifecycle()
                background = [tasks.create_task(self._heartbeat())]
                with STARTUP.stage("set_up"):
                    if not await self._set_up():
                        background[0].cancel()
                        await self._enter("stopped")
                        return
                self._when_set_up()
                await self._follow_actor()
                if self.actor.tick_every is not None:
                    background.append(tasks.create_task(self._tick(self.actor.tick_every)))
                background.append(tasks.create_task(self._serve()))
                background.append(tasks.create_task(self.actor.background()))
                await self._stop.wait()
                await self._drain(self._drain_timeout)
                for task in background:
                    task.cancel()
            await self.actor.tear_down()
            await self._enter("stopped")
        except BaseException:
            await self._enter("failed")
            raise
        finally:
            for subscription in self._internal:
                await subscription.stop()

    async def _set_up(self) -> bool:
        """Whether the actor was set up; not where it leaves that for a stop."""
        if not self.actor.abandons_set_up:
            await self.actor.set_up()
            return True
        setting_up, stopping = asyncio.create_task(self.actor.set_up()), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((setting_up, stopping), return_when=asyncio.FIRST_COMPLETED)
            if setting_up.done():
                await setting_up
            return setting_up.done()
        finally:
            setting_up.cancel()
            stopping.cancel()

    async def _ask_who_is_there(self) -> None:
        """What does not change is published seldom: a newcomer that listens asks for it."""
        if any(subscription.topic.type is Lifecycle for subscription in self.actor.subscriptions()):
            with contextlib.suppress(BusError):
                await self._bus.publish(lifecycle_requests(), LifecycleRequest())

    async def _claim_name(self) -> None:
        """Before anything is published or received under this name: peers would take two processes of one name for one
        that starts anew all the time."""
        topic = name_claims(self.actor.instance)
        with contextlib.suppress(BusError):  # the name is free, or its holder hangs and is about to be replaced
            holder = await self._bus.request(topic, NameClaim(self.incarnation), NameHolder, CLAIM_TIMEOUT)
            raise NameTaken(self.actor.instance, holder)
        self._internal.append(await self._bus.serve(topic, self._answer_claim))

    async def _answer_claim(self, claim: NameClaim) -> NameHolder:
        log.warning("another process wants this name", extra={"incarnation": claim.incarnation})
        return NameHolder(self.incarnation, os.getpid(), socket.gethostname())

    async def _find_spans(self, request: ReadSpans) -> SpansFound:
        """What is remembered of the request, and what is under way."""
        return spans_found(TRACING, request.name, self.actor.open_spans)

    async def _subscribe_all(self) -> None:
        control = instance_control(self.actor.instance)
        self._internal.append(await self._bus.subscribe(control, self._inbox.put, offer=self._offer))
        self._internal.append(await self._bus.subscribe(lifecycle_requests(), self._record_request))
        self._internal.append(await self._bus.subscribe(heartbeat_interval(), self._record_interval))
        if self.actor.service in RECORDERS:
            self._internal.append(await self._bus.serve(span_requests(self.actor.instance), self._find_spans))
        for subscription in self.actor.subscriptions():
            if not subscription.intake:
                self._internal.append(await self._subscribe(subscription))
        if not self._standby:
            await self._open_intake()

    async def _open_intake(self) -> None:
        for subscription in self.actor.subscriptions():
            if subscription.intake:
                self._intake.append(await self._subscribe(subscription))

    async def _subscribe(self, subscription: TopicSubscription[Any]) -> Subscription:
        if subscription.request:
            return await self._bus.serve(subscription.topic, self._receive_request)
        return await self._bus.subscribe(subscription.topic, self._inbox.put, offer=self._offer)

    def _offer(self, message: Any) -> bool:
        """Puts a message in the inbox, unless that is full."""
        if self._inbox.full():
            return False
        self._inbox.put_nowait(message)
        return True

    async def _receive_undelivered(self, message: Undelivered) -> None:
        UNDELIVERED.labels(self.actor.service).inc()
        await self._inbox.put(message)

    async def _receive_request(self, request: Any) -> Any:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        await self._inbox.put(PendingRequest(request, reply))
        return await reply

    async def _serve(self) -> None:
        while True:
            message = await self._inbox.get()
            self._busy = True
            match message:
                case PendingRequest(request, reply):
                    _reply(await self.actor.respond(request), reply)
                case Undelivered():
                    await self.actor.handle_undelivered(message)
                    await self._follow_actor()
                case Lifecycle() if self._is_incompatible(message):
                    pass
                case Tick() | Lifecycle():
                    await self.actor.handle(message)
                    await self._follow_actor()
                case Drain() | Undrain() | Standby():
                    await self._control(message)
                case _:
                    await self.actor.handle(message)
            self._busy = False
            self._progress += 1
            self._handled.inc()

    def _is_incompatible(self, message: Lifecycle) -> bool:
        """Whether the sender cannot work with us, by its release or its block size: for the actor it does not exist.
        Logged once."""
        if message.protocol == PROTOCOL and message.block_size in (None, self._block_size):
            return False
        why = incompatibility(message.protocols) or other_block_size(message.block_size, self._block_size)
        if why is not None and message.incarnation not in self._incompatible:
            self._incompatible[message.incarnation] = why
            log.error("incompatible process", extra={"from": message.instance, "reason": why})
        return why is not None

    async def _control(self, message: InstanceControl) -> None:
        match message:
            case Drain() if not self._draining:
                await self._begin_drain()
            case Standby() if not (self._standby or self._stop.is_set()):
                was_draining, self._draining, self._standby = self._draining, False, True
                if not was_draining:
                    await self._close_intake()
                await self._follow_actor()
                await self._publish_lifecycle()
            case Undrain() if (self._draining or self._standby) and not self._stop.is_set():
                self._draining = self._standby = False
                await self._open_intake()
                await self.actor.on_undrain()
                log.info("undrained")
                await self._follow_actor()
            case _:
                pass

    async def _begin_drain(self) -> None:
        self._draining, self._standby = True, False
        await self._enter("draining")
        await self._close_intake()

    async def _close_intake(self) -> None:
        for each in self._intake:
            await each.stop()
        self._intake.clear()
        await self.actor.on_drain()

    async def _drain(self, timeout: float) -> None:
        """Closes the intake and waits until the actor is idle, `timeout` seconds at most."""
        if not self._draining:
            await self._begin_drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._busy or not self._inbox.empty() or not self.actor.is_idle():
                    await asyncio.sleep(IDLE_POLL)
                return
        log.warning("stopped with open requests", extra={"load": self.actor.load()})

    async def _follow_actor(self) -> None:
        if self._draining:
            return
        phase = self.actor.target_phase()
        if self._standby and phase == "ready":
            phase = "draining"
        if phase != self._table.phase:
            await self._enter(phase)

    async def _enter(self, phase: Phase) -> None:
        before = self._table.phase
        if self._table.move(phase):
            is_standby = self._standby and phase == "draining"
            for each in (before, "standby"):
                PHASE.labels(self.actor.service, each).set(0)
            PHASE.labels(self.actor.service, "standby" if is_standby else phase).set(1)
            log.info("phase", extra={"phase": phase})
            await self._publish_lifecycle()
            if before == "starting" and (phase == "ready" or is_standby):
                STARTUP.finish()

    async def _tick(self, every: float) -> None:
        while True:
            await asyncio.sleep(every)
            await self._inbox.put(Tick(time.monotonic(), self._bus.liveness_now()))

    async def _heartbeat(self) -> None:
        while True:
            before = time.monotonic()
            HEARTBEAT_AGE.set_function(lambda since=before: time.monotonic() - since)  # type: ignore[misc]
            await asyncio.sleep(HEARTBEAT_SECONDS)
            life = self._lifecycle()
            if self._beat.is_due(life, asyncio.get_running_loop().time()):
                await self._publish(life)
            if (pause := time.monotonic() - before - HEARTBEAT_SECONDS) > MAX_PAUSE_REPORTED:
                log.warning("event loop was blocked", extra={"seconds": round(pause, 3)})

    async def _record_request(self, request: LifecycleRequest) -> None:
        self._beat.request()

    async def _record_interval(self, interval: HeartbeatInterval) -> None:
        self._beat.set_interval(interval.keep_alive)
        self.actor.set_interval(interval)

    async def _publish_lifecycle(self) -> None:
        await self._publish(self._lifecycle())

    async def _publish(self, life: Lifecycle) -> None:
        self._beat.record_published(life, asyncio.get_running_loop().time())
        with contextlib.suppress(BusError):
            await self._bus.publish(self.actor.lifecycle_topic(), life)

    def _lifecycle(self) -> Lifecycle:
        actor = self.actor
        return Lifecycle(
            service=actor.service,
            instance=actor.instance,
            incarnation=self.incarnation,
            phase=self._table.phase,
            pid=os.getpid(),
            host=socket.gethostname(),
            started=self._started,
            load=actor.load(),
            progress=self._progress,
            metrics_port=self._metrics_port,
            engine=actor.engine_report(),
            worker=actor.worker_report(),
            store=actor.store_report(),
            tokenizer=actor.tokenizer_report(),
            sleep=actor.sleep_report(),
            min_protocol=MIN_PROTOCOL,
            protocol=PROTOCOL,
            isolated=actor.isolated,
            standby=self._standby,
            keep_alive=self._beat.keep_alive,
            block_size=self._block_size,
            detokenizer=actor.detokenizer_report(),
            encoder=actor.encoder_report(),
        )


def _reply(answer: Any, reply: asyncio.Future[Any]) -> None:
    """Sets the reply, now or when `answer` is done; there is none where that is cancelled. What making it raises is
    left to the actor to raise."""
    if not isinstance(answer, asyncio.Future):
        reply.set_result(answer)
        return

    def forward(done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            reply.cancel()
        elif done.exception() is None and not reply.done():
            reply.set_result(done.result())

    answer.add_done_callback(forward)
