"""The console's stream of changes: one document, computed once each interval for all viewers, and only while there are
any. Without a viewer nothing is subscribed to and nothing runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from services.gateway.console.document import MAX_REQUESTS, stack_document
from services.gateway.console.engine_feed import EngineFeed
from services.gateway.console.merge_patch import JsonObject, merge_patch
from services.gateway.console.overview import overview_of
from services.gateway.console.stack_view import StackView
from services.gateway.console.viewer import ConsoleViewer, ViewerConnection, event_bytes
from services.gateway.peers import GatewayPeers
from services.gateway.request_table import RequestTable
from shared import topics
from shared.bus import Bus, BusError
from shared.ids import GatewayId, InstanceId
from shared.messages.gateway import GatewayOverview, ReadOverview
from shared.messages.lifecycle import LifecycleRequest
from shared.traces.request_trace import RequestTrace, request_trace

log = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two patches."""
ANSWERED = 0.6
"""Seconds in which every process says how it is, when asked."""
MAX_VIEWERS = 32
"""Further ones are refused."""


class ConsoleFeed:
    """Owns the viewers and, while there are any, the document that they have."""

    def __init__(
        self,
        bus: Bus,
        table: RequestTable,
        peers: GatewayPeers,
        *,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`interval`: seconds; `clock`, `wall`: monotonic and Unix seconds."""
        self._bus, self._table, self._peers = bus, table, peers
        self.interval, self._clock, self._wall = interval, clock, wall
        self._viewers: set[ConsoleViewer] = set()
        self.engines = EngineFeed(bus, interval)
        """What pages that look into an engine see."""
        self._looked_at = asyncio.Event()
        self._document: JsonObject = {}
        """What viewers that have started have; empty before the first."""
        self.computed = 0
        """How often the document was made."""

    @property
    def full(self) -> bool:
        """Whether no further viewer is taken."""
        return len(self._viewers) >= MAX_VIEWERS

    @property
    def watched(self) -> bool:
        """Whether somebody looks."""
        return bool(self._viewers)

    def has_engine(self, engine: str) -> bool:
        """Whether an engine of this name lives and serves, or has just done."""
        return any(life.instance == engine for life in self._table.cluster.engines())

    async def request(self, name: str) -> RequestTrace | None:
        """Returns the way of a request, open or ended a while ago; None where no process remembers it. Raises
        GatewaysSilent."""
        gateways = [self._peers.own, *self._peers.alive()]
        return await request_trace(self._bus, name, map(InstanceId, gateways), self._table.cluster.instances())

    def add(self, connection: ViewerConnection) -> ConsoleViewer:
        """Takes a viewer, whose response has been started; it begins with the whole document."""
        viewer = ConsoleViewer(connection)
        self._viewers.add(viewer)
        if self._document:
            viewer.write(event_bytes(b"snapshot", self._document))
        self._looked_at.set()
        return viewer

    def remove(self, viewer: ConsoleViewer) -> None:
        """Forgets a viewer."""
        self._viewers.discard(viewer)

    def stop(self) -> None:
        """Ends all viewers' streams, as the gateway is stopping."""
        for viewer in self._viewers:
            viewer.end(told=True)
        self.engines.stop()

    async def run(self) -> None:
        """Follows the stack whenever somebody looks."""
        while True:
            await self._looked_at.wait()
            await self._follow()
            self._looked_at.clear()
            if self._viewers:
                self._looked_at.set()

    async def _follow(self) -> None:
        view = StackView(self._clock, self._wall)
        subscriptions = [
            await self._bus.subscribe(topics.lifecycles(), view.record),
            await self._bus.subscribe(topics.planner_decisions(), view.record_decision),
        ]
        try:
            await self._ask_for_lifecycles()
            await asyncio.sleep(min(ANSWERED, self.interval))
            while self._viewers:
                self._send(view, await self._overviews())
                await asyncio.sleep(self.interval)
        finally:
            self._document = {}
            for subscription in subscriptions:
                await subscription.stop()

    async def _ask_for_lifecycles(self) -> None:
        """So that a page need not wait for the keep-alives of a large fleet."""
        try:
            await self._bus.publish(topics.lifecycle_requests(), LifecycleRequest())
        except BusError as error:
            log.warning("lifecycles not asked for", extra={"error": str(error)})

    async def _overviews(self) -> dict[GatewayId, GatewayOverview]:
        """What each gateway adds; of one that does not answer in time nothing is shown."""
        others: dict[GatewayId, GatewayOverview] = await self._peers.ask_all(
            ReadOverview(MAX_REQUESTS), GatewayOverview
        )
        return {self._peers.own: overview_of(self._table, MAX_REQUESTS), **others}

    def _send(self, view: StackView, overviews: Mapping[GatewayId, GatewayOverview]) -> None:
        document = self._compute(view, overviews)
        patch = merge_patch(self._document, document)
        event = event_bytes(b"patch", patch)
        self._document = document
        whole: bytes | None = None
        for viewer in self._viewers:
            if viewer.started:
                viewer.write(event)
            else:
                whole = whole or event_bytes(b"snapshot", document)
                viewer.write(whole)

    def _compute(self, view: StackView, overviews: Mapping[GatewayId, GatewayOverview]) -> JsonObject:
        self.computed += 1
        table = self._table
        figures = view.look()
        return stack_document(
            view,
            figures,
            table.cluster.models(),
            overviews,
            view.decisions,
            time=self._wall(),
            gateway=self._peers.own,
            not_serving=table.not_serving(),
        )
