"""The coordinator's shell: bus in, core asked, bus out."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, assert_never

import msgspec

from services.coordinator import admin, metrics
from services.coordinator.core.actions import Action, CancelAt, Moment, Place, Tell
from services.coordinator.core.coordinator import Coordinator
from services.coordinator.core.limits import Limits
from services.coordinator.core.routing import Routing
from shared import topics
from shared.actor import Actor, Hears, Tick
from shared.bus import Bus, PayloadTooLarge, Undelivered
from shared.ids import InstanceId
from shared.messages.coordinator import PlacementMade, Route, Withdraw
from shared.messages.gateway import Failed, Placed, Queued, Rejected
from shared.messages.kv_events import DumpRequest, KvDump, KvEvents
from shared.messages.lifecycle import Lifecycle
from shared.messages.scheduler import Generate

log = logging.getLogger(__name__)


class CoordinatorActor(Actor):
    """Owns a core that owns the placement of requests. Any number of coordinators may run."""

    service = "coordinator"
    tick_every = 0.5

    def __init__(
        self,
        bus: Bus,
        instance: InstanceId,
        limits: Limits,
        routing: Routing | None = None,
        *,
        scale_timeout: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(bus, instance)
        self._clock = clock
        # Different names start the rotation at different engines.
        turn = zlib.crc32(instance.encode())
        self.core = Coordinator(instance, limits, routing, turn=turn, since=bus.liveness_now())
        self._index_gauges = metrics.IndexGauges()
        self._admin = admin.Admin(bus, self.core.fleet.registry, scale_timeout)

    def hears(self) -> Sequence[Hears[Any]]:
        return [
            Hears(topics.route(), intake=True),
            Hears(topics.withdrawals()),
            Hears(topics.placements()),
            Hears(topics.lifecycles()),
            Hears(topics.all_kv_events()),
            Hears(topics.kv_dumps(self.instance)),
        ]

    async def set_up(self) -> None:
        await self.bus.serve_micro(admin.NAME, admin.VERSION, admin.DESCRIPTION, self._admin.endpoints())

    async def handle(self, message: Any) -> None:
        match message:
            case Route():
                await self._send(self._decide(message))
            case Withdraw():
                if self.core.withdraw(message):
                    log.info("withdrawn", extra={"request": message.request, "attempt": message.attempt})
            case PlacementMade():
                self.core.placed_elsewhere(message, self._moment())
            case KvEvents() | KvDump():
                self.core.blocks_changed(message, self._moment())
                await self._ask_for_dumps()
            case Lifecycle():
                await self._send(self.core.lifecycle(message, self._moment()))
                await self._ask_for_dumps()
            case Tick():
                await self._send(self.core.time_passed(self._moment()))
                await self._ask_for_dumps()
                self._index_gauges.show(self.core.sources)
            case Undelivered():
                await self._returned(message)
            case _:
                raise TypeError(f"a coordinator hears no {type(message).__name__}")
        metrics.WAITING.set(len(self.core.line))

    async def drained(self) -> None:
        await self._hand_over()

    async def tear_down(self) -> None:
        """Whoever still waits is told so, and may be dispatched again."""
        for generation in self.core.line.clear():
            failed = Failed(generation.request, generation.attempt, "the coordinator that it waited at has stopped")
            await self.bus.publish(topics.gateway_inbox(generation.gateway), failed)

    def is_idle(self) -> bool:
        return not len(self.core.line)

    def load(self) -> int:
        return len(self.core.line)

    def _moment(self) -> Moment:
        return Moment(self._clock(), self.bus.liveness_now())

    def _decide(self, route: Route) -> list[Action]:
        with metrics.DECISION.time():
            actions = self.core.route(route, self._moment())
        extra = {"request": route.generation.request, "attempt": route.generation.attempt}
        if not actions:
            metrics.STALE.inc()
            log.info("stale", extra=extra)
        elif route.generation.request in self.core.line:
            log.info("queued", extra=extra)
        return actions

    async def _ask_for_dumps(self) -> None:
        for source in self.core.dumps_wanted(self._moment()):
            log.info("asks for a dump", extra={"source": source})
            await self.bus.publish(topics.kv_dump_requests(source), DumpRequest(self.instance))

    async def _returned(self, undelivered: Undelivered) -> None:
        match undelivered.message:
            case Generate() as generate:
                await self._send(self._lost_engine(generate))
            case Placed() | Queued() | Rejected() as told:
                log.warning("gateway gone", extra={"request": told.request, "attempt": told.attempt})
                await self._send(self.core.gateway_unreachable(told))
            case Route() as route:
                await self._send(self.core.route(route, self._moment()))
            case other:
                log.warning("undelivered", extra={"message_type": type(other).__name__})

    def _lost_engine(self, generate: Generate) -> list[Action]:
        request = generate.generation.request
        engine = self.core.engine_of(request)
        metrics.UNREACHABLE.labels(engine or "unknown").inc()
        log.warning("engine unreachable", extra={"request": request, "engine": engine})
        return self.core.engine_unreachable(generate, self._moment())

    async def _hand_over(self) -> None:
        for route in self.core.hand_over():
            log.info("handed over", extra={"request": route.generation.request})
            await self.bus.publish(topics.route(), route, confirm=True)

    async def _send(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Place():
                    await self._place(action)
                case Tell(gateway, message):
                    if isinstance(message, Rejected):
                        _note_rejection(message)
                    await self.bus.publish(topics.gateway_inbox(gateway), message, confirm=True)
                case CancelAt(engine, cancel):
                    await self.bus.publish(topics.engine_control(engine), cancel)
                case _:
                    assert_never(action)

    async def _place(self, action: Place) -> None:
        generation, placed = action.generate.generation, action.placed
        gateway = topics.gateway_inbox(generation.gateway)
        try:
            await self.bus.publish(topics.engine_requests(action.engine), action.generate, confirm=True)
        except PayloadTooLarge as error:
            rejected = Rejected(
                request=generation.request, attempt=generation.attempt, kind="too_large", message=str(error)
            )
            _note_rejection(rejected)
            await self.bus.publish(gateway, rejected, confirm=True)
            return
        if action.told is not None:
            await self.bus.publish(topics.placements(), action.told)
        await self.bus.publish(gateway, placed, confirm=True)
        metrics.PLACEMENTS.labels(action.engine).inc()
        metrics.note_routed(action, self.core.routing.policy)
        metrics.WAITED.observe(action.waited)
        routed = {"decode_on": action.generate.decode_on, "predicted_cached": action.generate.predicted_cached}
        log.info("placed", extra=msgspec.structs.asdict(placed) | routed)


def _note_rejection(message: Rejected) -> None:
    metrics.REJECTIONS.labels(message.kind).inc()
    extra = {"request": message.request, "attempt": message.attempt, "kind": message.kind, "reason": message.message}
    log.info("rejected", extra=extra)
