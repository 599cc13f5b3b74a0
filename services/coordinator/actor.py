"""The coordinator's shell: receives messages, asks the core, sends what it answers."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, assert_never

import msgspec

from services.coordinator import admin, metrics
from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.actions import AccuseEngine, Action, CancelOnEngine, Moment, NotifyGateway, PlaceRequest
from services.coordinator.core.coordinator import Coordinator
from services.coordinator.core.engine_slowdowns import NO_SLOWDOWN, Slowdown
from services.coordinator.core.fleet_heartbeat import FleetHeartbeat
from services.coordinator.prefix_tree import PrefixNode, PrefixTree
from shared import topics
from shared.actor import Actor, Tick, TopicSubscription
from shared.bus import Bus, PayloadTooLarge, Undelivered
from shared.ids import GatewayId, InstanceId
from shared.messages.coordinator import PlacementMade, PullPrefills, RequestEnded, Route, Withdraw
from shared.messages.gateway import RequestFailed, RequestPlaced, RequestQueued, RequestRejected
from shared.messages.kv_events import KvDump, KvDumpRequest, KvEvents
from shared.messages.lifecycle import Lifecycle
from shared.messages.scheduler import GenerateRequest
from shared.telemetry.logs import record_trace
from shared.telemetry.metrics import PublishedTotals
from shared.telemetry.tracing import TRACING

log = logging.getLogger(__name__)


class CoordinatorActor(Actor):
    """Owns a core that owns the placement of requests. Any number of coordinators may run."""

    service = "coordinator"
    tick_every = 0.5

    def __init__(
        self,
        bus: Bus,
        instance: InstanceId,
        config: CoordinatorConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(bus, instance)
        self._clock = clock
        # Different names start the rotation at different engines.
        turn = zlib.crc32(instance.encode())
        self.core = Coordinator(instance, config, turn=turn)
        self._heartbeat = FleetHeartbeat(config.lifecycle_budget, config.kv_event_budget)
        self._totals = PublishedTotals()
        self._ejected: frozenset[InstanceId] = frozenset()
        self._slowdowns: dict[InstanceId, Slowdown] = {}
        """As it was last logged."""
        self._prefixes = PrefixTree(config.block_size)
        self._admin = admin.Admin(bus, self.core.fleet.registry, config.scale_timeout, self._prefix_nodes)

    def _prefix_nodes(self) -> list[PrefixNode]:
        return self._prefixes.nodes(self.core.sources.holders)

    def subscriptions(self) -> Sequence[TopicSubscription[Any]]:
        """Routes are shared out among coordinators; everything else goes to each of them."""
        return [
            TopicSubscription(topics.route(), intake=True),
            TopicSubscription(topics.withdrawals()),
            TopicSubscription(topics.placements()),
            TopicSubscription(topics.prefill_pulls()),
            TopicSubscription(topics.lifecycles()),
            TopicSubscription(topics.all_kv_events()),
            TopicSubscription(topics.kv_dumps(self.instance)),
        ]

    async def set_up(self) -> None:
        """Offers the operators' endpoints, `admin.*`."""
        await self.bus.serve_micro(admin.NAME, admin.VERSION, admin.DESCRIPTION, self._admin.endpoints())

    async def handle(self, message: Any) -> None:
        """One message to the core, and what the core answers to the bus. Raises TypeError for a message that no topic
        of a coordinator carries."""
        at = Moment(self._clock(), self.bus.liveness_now())
        match message:
            case Route():
                record_trace(message.generation.request, message.generation.trace)
                suspect = message.generation.suspect_until is not None
                if suspect:
                    await self.isolate(message.generation.request)
                await self._send(self._route(message, at))
                if suspect:
                    await self.isolate(None)
            case Withdraw():
                await self._send(self.core.withdraw(message))
            case RequestEnded():
                self.core.record_ended(message)
            case PullPrefills():
                await self._send(self.core.pull(message, at))
            case PlacementMade():
                self.core.record_announcement(message, at)
            case KvEvents() | KvDump():
                self.core.blocks_changed(message, at)
                await self._request_dumps(at)
            case Lifecycle():
                await self._send(self.core.lifecycle(message, at))
                await self._request_dumps(at)
                if message.engine is not None:
                    self._follow_paces()
            case Tick():
                await self._send(self.core.time_passed(at))
                await self._request_dumps(at)
                self._follow_ejections()
                if (interval := self._heartbeat.due(self.core.fleet.registry.all(), at.alive)) is not None:
                    seconds = {"seconds": interval.keep_alive, "kv_events": interval.kv_events}
                    log.info("heartbeat interval", extra=seconds)
                    await self.bus.publish(topics.heartbeat_interval(), interval)
                metrics.show_index(self.core.sources, self._totals)
            case Undelivered():
                await self._send(self._undelivered(message.message, at))
            case _:
                raise TypeError(f"a coordinator takes no {type(message).__name__}")
        metrics.WAITING.set(self.load())

    def _follow_ejections(self) -> None:
        """Shows and logs which engines get no requests. Not at each report: while a large fleet starts, each changes
        who might be ejected, and to see who is takes a look at all."""
        fleet = self.core.fleet
        ejected = fleet.all_ejected()
        if ejected == self._ejected:
            return
        for engine in ejected - self._ejected:
            log.warning("engine ejected", extra={"engine": engine, "reason": fleet.suspicion_of(engine)})
        for engine in self._ejected - ejected:
            log.info("engine no longer ejected", extra={"engine": engine})
        self._ejected = ejected
        metrics.EJECTED.set(len(ejected))

    def _follow_paces(self) -> None:
        """Shows and logs which engines are slower or quicker than most."""
        slowdowns = self.core.fleet.slowdowns
        if slowdowns == self._slowdowns:
            return
        for engine in sorted(slowdowns.keys() | self._slowdowns.keys()):
            each = slowdowns.get(engine, NO_SLOWDOWN)
            if each != self._slowdowns.get(engine, NO_SLOWDOWN):
                log.info("engine's slowdown", extra={"engine": engine, "prefill": each.prefill, "decode": each.decode})
        self._slowdowns = dict(slowdowns)
        metrics.show_slowdowns(slowdowns)

    async def on_drain(self) -> None:
        """Gives the queue to another coordinator, where there is one."""
        for route in self.core.release_queue():
            log.info("handed over", extra={"request": route.generation.request})
            await self.bus.publish(topics.route(), route, confirm=True)

    async def tear_down(self) -> None:
        """Fails the requests that still wait, so that their gateways dispatch them again."""
        for generation in (*self.core.queue.clear(), *self.core.prefills.clear()):
            failed = RequestFailed(
                generation.request, generation.attempt, "the coordinator that it waited at has stopped"
            )
            await self.bus.publish(topics.gateway_inbox(generation.gateway), failed)

    def is_idle(self) -> bool:
        """Whether no request waits here."""
        return not self.load()

    def load(self) -> int:
        """Requests that wait here."""
        return len(self.core.queue) + len(self.core.prefills)

    def _route(self, route: Route, at: Moment) -> list[Action]:
        with metrics.DECISION.time():
            actions = self.core.route(route, at)
        extra = {"request": route.generation.request, "attempt": route.generation.attempt}
        if not actions:
            metrics.STALE.inc()
            log.info("stale attempt dropped", extra=extra)
        elif any(isinstance(action, NotifyGateway) and isinstance(action.message, RequestQueued) for action in actions):
            log.info("queued", extra=extra)
        return actions

    async def _request_dumps(self, at: Moment) -> None:
        for source in self.core.dumps_due(at):
            log.info("dump requested", extra={"source": source})
            await self.bus.publish(topics.kv_dump_requests(source), KvDumpRequest(self.instance))

    def _undelivered(self, message: object, at: Moment) -> list[Action]:
        """What follows from a message that had no subscriber."""
        match message:
            case GenerateRequest(generation):
                engine = self.core.engine_of(generation.request)
                metrics.UNREACHABLE.labels(engine or "unknown").inc()
                log.warning("engine unreachable", extra={"request": generation.request, "engine": engine})
                return self.core.engine_unreachable(message, at)
            case RequestPlaced() | RequestQueued() | RequestRejected() | RequestFailed():
                log.warning("gateway gone", extra={"request": message.request, "attempt": message.attempt})
                return self.core.gateway_unreachable(message)
            case Route():
                return self.core.route(message, at)
            case _:
                log.warning("message not delivered", extra={"message_type": type(message).__name__})
                return []

    async def _send(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case PlaceRequest():
                    await self._place(action)
                case NotifyGateway(gateway, message):
                    await self._notify(gateway, message)
                case CancelOnEngine(engine, cancel):
                    log.info("cancelled", extra={"request": cancel.request, "engine": engine})
                    await self.bus.publish(topics.engine_control(engine), cancel)
                case AccuseEngine(engine, report):
                    metrics.ACCUSATIONS.labels(engine).inc()
                    log.warning("engine accused", extra={"engine": engine, "reason": report.reason})
                    await self.bus.publish(topics.engine_control(engine), report)
                    self._follow_ejections()
                case _:
                    assert_never(action)

    async def _place(self, action: PlaceRequest) -> None:
        generate, generation = action.generate, action.generate.generation
        request, attempt = generation.request, generation.attempt
        begun = time.time() - action.waited  # before the engine has it, and may be quicker than what follows here
        try:
            await self.bus.publish(topics.engine_requests(action.engine), generate, confirm=True)
        except PayloadTooLarge as error:
            rejected = RequestRejected(request=request, attempt=attempt, kind="too_large", message=str(error))
            await self._notify(generation.gateway, rejected)
            return
        if action.announcement is not None:
            await self.bus.publish(topics.placements(), action.announcement)
        placed = RequestPlaced(request, attempt, action.engine, generate.detokenizer)
        await self.bus.publish(topics.gateway_inbox(generation.gateway), placed, confirm=True)
        metrics.record_placement(action, self.core.config.router_policy)
        ended = time.time()
        self._prefixes.record(generation, ended)
        cached = generate.predicted_cached
        TRACING.record("route", generation.trace, begun, ended, engine=action.engine, predicted_cached=cached)
        extra = {"decode_on": generate.decode_on, "predicted_cached": generate.predicted_cached}
        log.info("placed", extra=msgspec.structs.asdict(placed) | extra)

    async def _notify(self, gateway: GatewayId, message: RequestQueued | RequestRejected | RequestFailed) -> None:
        if isinstance(message, RequestRejected):
            metrics.REJECTIONS.labels(message.kind).inc()
            extra = {"request": message.request, "attempt": message.attempt, "kind": message.kind}
            log.info("rejected", extra=extra | {"reason": message.message})
        await self.bus.publish(topics.gateway_inbox(gateway), message, confirm=True)
