"""Clients and the coordinator's real core on virtual time: requests come, are placed, and end."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Protocol

from deploy.simulation.cell import CellOrder, DeliverRequest
from deploy.simulation.engine import AnswerComplete, EngineEvent, EngineStopped, number_of
from deploy.simulation.fleet import SimulatedFleet
from deploy.simulation.hops import HopDelays
from deploy.simulation.kit import SimulationError
from deploy.simulation.prompts import SimRequest, generation_of
from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.actions import Action, Moment, NotifyGateway, PlaceRequest
from services.coordinator.core.coordinator import Coordinator
from shared.ids import EngineId, Incarnation, InstanceId, ModelName, RequestId
from shared.messages.coordinator import PullPrefills, Route
from shared.messages.gateway import RequestRejected
from shared.messages.kv_events import KvEvents
from shared.messages.lifecycle import HEARTBEAT_SECONDS, Lifecycle

COORDINATOR = InstanceId("coordinator-1")
NOBODY_DIES = 0.0
"""The liveness clock stands still: nothing falls silent here, and engines leave out heartbeats that say nothing new."""


class Workload(Protocol):
    """A load: requests, by time."""

    @property
    def concurrency(self) -> int | None:
        """How many requests are open at any time, each followed by the next; None: each comes at its own time."""

    @property
    def description(self) -> dict[str, object]:
        """What it is, for the report."""

    def requests(self) -> Iterator[SimRequest]:
        """All of them, in the order of their times; the same at each call."""


@dataclass(slots=True)
class SentRequest:
    """What a client has sent."""

    request: SimRequest
    sent: float
    engine: EngineId | None = None
    """Where it was placed."""
    predicted_cached: int = 0
    error: str | None = None
    """Why it was placed nowhere."""


class RequestFront:
    """Owns the clients' open requests, the coordinator's core, and all messages that are on their way to it."""

    def __init__(
        self,
        config: CoordinatorConfig,
        workload: Workload,
        model: ModelName,
        hops: HopDelays,
        fleet: SimulatedFleet | None = None,
    ) -> None:
        self.coordinator = Coordinator(COORDINATOR, config, turn=zlib.crc32(COORDINATOR.encode()))
        self.sent: list[SentRequest] = []
        """All requests so far, in the order in which they came to the coordinator."""
        self.fleet = fleet or SimulatedFleet()
        self.orders: list[CellOrder] = []
        """To be taken by whoever simulates the engines."""
        self.peak = 0
        """The most that were open at a time."""
        self._model = model
        self._hops = hops
        self._concurrency = workload.concurrency
        self._requests = workload.requests()
        self._open: dict[RequestId, SentRequest] = {}
        self._arrivals: list[tuple[float, int, SimRequest]] = []
        """By the time at which they come to the coordinator."""
        self._news: list[EngineEvent] = []
        self._tick_at = 0.0
        self._decide_at = self.fleet.policy.interval
        self._send_first()

    @property
    def next_input(self) -> float:
        """When it may next give an engine something to do, as far as is known; infinity for never."""
        arrival = self._arrivals[0][0] if self._arrivals else inf
        decision = self._decide_at if self._decides else inf
        return min(arrival, decision, self._tick_at if self._waits else inf)

    @property
    def reaction(self) -> float:
        """Seconds within which something that happens at an engine brings work to one; infinity for never."""
        hops = self._hops
        waits = hops.report + hops.place if self._waits else inf
        follows = hops.tokens + hops.request + hops.place if self._concurrency else inf
        return min(waits, follows)

    @property
    def _waits(self) -> bool:
        """Whether a request waits at the coordinator."""
        return bool(self.coordinator.queue or self.coordinator.prefills)

    @property
    def _decides(self) -> bool:
        """Whether the fleet still changes: not behind the last request's arrival."""
        clients = self._concurrency is not None and self._open
        return bool(self._arrivals or self._waits or clients)

    def hear(self, news: list[EngineEvent]) -> None:
        """What is on its way from engines."""
        for each in news:
            heappush(self._news, each)

    def run(self, until: float) -> None:
        """Simulates it up to that time, exclusively; by then all news is on its way. Raises SimulationError."""
        while True:
            arrival = self._arrivals[0][0] if self._arrivals else inf
            news = self._news[0].at if self._news else inf
            now = min(arrival, news)
            busy = now < inf or self._waits
            if self._decides and self._decide_at <= min(now, self._tick_at) and self._decide_at < until:
                self._decide()
            elif self._tick_at <= now and self._tick_at < until and busy:
                self._tick()
            elif now >= until or now == inf:
                return
            elif news <= arrival:
                self._take_news(heappop(self._news))
            else:
                _, _, request = heappop(self._arrivals)
                self._route(request, arrival)

    # ---- clients

    def _send_first(self) -> None:
        for _ in range(self._concurrency or 1):
            self._send_next(0.0)

    def _send_next(self, earliest: float) -> None:
        request = next(self._requests, None)
        if request is not None:
            at = max(request.at, earliest)
            heappush(self._arrivals, (at + self._hops.request, request.number, request._replace(at=at)))

    def _route(self, request: SimRequest, now: float) -> None:
        if self._concurrency is None:
            self._send_next(0.0)
        sent = self._open[request.id] = SentRequest(request, request.at)
        self.sent.append(sent)
        self.peak = max(self.peak, len(self._open))
        generation = generation_of(request, self._model, request.at, self.coordinator.config.block_size)
        self._act(self.coordinator.route(Route(generation), _moment(now)), now)

    def _end(self, request: RequestId, now: float) -> SentRequest:
        if self._concurrency is not None:
            self._send_next(now)
        return self._open.pop(request)

    # ---- the coordinator

    def _tick(self) -> None:
        """Every half second: what only looks at the clock, and the detokenizer's heartbeat."""
        now, self._tick_at = self._tick_at, self._tick_at + HEARTBEAT_SECONDS
        self._act(self.coordinator.lifecycle(_DETOKENIZER, _moment(now)), now)
        self._act(self.coordinator.time_passed(_moment(now)), now)

    def _decide(self) -> None:
        now, self._decide_at = self._decide_at, self._decide_at + self.fleet.policy.interval
        self.orders += self.fleet.decide(self.coordinator, self._model, now, now + self._hops.place)

    def _take_news(self, news: EngineEvent) -> None:
        match news.message:
            case Lifecycle():
                self._act(self.coordinator.lifecycle(news.message, _moment(news.at)), news.at)
            case KvEvents():
                self.coordinator.blocks_changed(news.message, _moment(news.at))
            case PullPrefills():
                self._act(self.coordinator.pull(news.message, _moment(news.at)), news.at)
            case AnswerComplete(request):
                self._end(request, news.at)
            case EngineStopped(engine):
                self.fleet.lives[engine].stopped = news.at

    def _act(self, actions: list[Action], now: float) -> None:
        for action in actions:
            match action:
                case PlaceRequest(engine, generate):
                    sent = self._open[generate.generation.request]
                    sent.engine, sent.predicted_cached = engine, generate.predicted_cached
                    self.orders.append(DeliverRequest(number_of(engine), now + self._hops.place, generate))
                case NotifyGateway(_, RequestRejected() as rejected):
                    error = f"{rejected.kind}: {rejected.message}"
                    self._end(rejected.request, now).error = error
                case NotifyGateway():
                    pass  # it waits
                case _:
                    raise SimulationError(f"the coordinator: {action}")


_DETOKENIZER = Lifecycle(
    service="detokenizer",
    instance=InstanceId("detokenizer-1"),
    incarnation=Incarnation(1),
    phase="ready",
    pid=0,
    host="simulated",
    started=0.0,
)


def _moment(now: float) -> Moment:
    return Moment(now, NOBODY_DIES)
