"""The other gateways of the stack: who is alive, and what this gateway asks them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from prometheus_client.registry import Collector

from services.gateway.core.stream_records import GatewayRun
from services.gateway.metrics import MergedPages
from shared import topics
from shared.bus import Bus, BusError
from shared.ids import GatewayId, InstanceId
from shared.messages.gateway import AbortRequests, GatewayRequest, MetricsPage, ReadMetrics, RequestsAborted
from shared.messages.lifecycle import Lifecycle
from shared.registry import Registry
from shared.telemetry.metrics import metrics_page

ANSWER_TIMEOUT = 1.0
"""Seconds that another gateway may take to answer. Its own answers wait for nobody."""
REST = 3.0
"""So many times as long as making a page took, no other is begun: who asks meanwhile waits for the next one."""


class GatewayPeers:
    """Owns the registry of gateways; this one's own lifecycle messages are left out."""

    def __init__(self, bus: Bus, own: GatewayId, metrics: Collector) -> None:
        """`metrics`: this gateway's."""
        self.own, self._metrics = own, metrics
        self._bus = bus
        self._registry = Registry()

    def record_lifecycle(self, message: Lifecycle, now: float) -> bool:
        """Takes a gateway's lifecycle message. Returns whether others are ready than before."""
        before = self.ready()
        if message.instance != InstanceId(self.own):
            self._registry.record_lifecycle(message, now)
        return self.ready() != before

    def expire(self, now: float) -> None:
        """Forgets gateways that were silent for too long."""
        self._registry.expire(now)

    def alive(self) -> list[GatewayId]:
        """Returns the other gateways that live, draining ones included, in the order of their names."""
        return sorted(GatewayId(message.instance) for message in self._registry.all())

    def lives(self) -> set[GatewayRun]:
        """Returns the runs of the other gateways that live."""
        return {_life(message) for message in self._registry.all()}

    def ready(self) -> list[GatewayRun]:
        """Returns those that serve requests and do not drain, in the order of their names."""
        return sorted(_life(message) for message in self._registry.all(phase="ready"))

    async def ask_all(self, request: GatewayRequest, reply_type: Any) -> dict[GatewayId, Any]:
        """Returns the answers of all other gateways that answer in time."""
        peers = self.alive()
        answers = await asyncio.gather(*(self._ask(peer, request, reply_type) for peer in peers))
        return {peer: answer for peer, answer in zip(peers, answers, strict=True) if answer is not None}

    async def _ask(self, peer: GatewayId, request: GatewayRequest, reply_type: Any) -> Any:
        try:
            return await self._bus.request(topics.gateway_requests(peer), request, reply_type, ANSWER_TIMEOUT)
        except BusError:  # it died meanwhile, or is of a release that answers nothing
            return None

    async def abort(self, responses: Collection[str] | None) -> list[str]:
        """Has the other gateways end these responses, or all. Returns the ids that they found."""
        question = AbortRequests(None if responses is None else tuple(responses))
        answers: dict[GatewayId, RequestsAborted] = await self.ask_all(question, RequestsAborted)
        return [response for answer in answers.values() for response in answer.responses]

    def own_metrics_page(self, openmetrics: bool) -> bytes:
        """Returns what this gateway measures, in Prometheus' text format or in OpenMetrics'."""
        return metrics_page(self._metrics, openmetrics=openmetrics)

    async def read_metrics(self, request: ReadMetrics) -> MetricsPage:
        """Answers another gateway: with what this one measures, made on a thread."""
        return MetricsPage(await asyncio.to_thread(self.own_metrics_page, request.openmetrics))

    async def others_metrics(self, openmetrics: bool) -> dict[GatewayId, bytes]:
        """Returns the metrics of the other gateways, in Prometheus' text format or in OpenMetrics'."""
        others: dict[GatewayId, MetricsPage] = await self.ask_all(ReadMetrics(openmetrics), MetricsPage)
        return {peer: page.text for peer, page in others.items()}


class MetricsPages:
    """Owns which pages of all gateways' metrics are to be made. Each takes tens of milliseconds, so it is made on a
    thread, and clients who ask at once get the same: anybody may, without a key."""

    def __init__(self, peers: GatewayPeers, engines: Callable[[], Sequence[Lifecycle]]) -> None:
        """`engines`: those that live."""
        self._peers, self._engines = peers, engines
        self._next: dict[bool, asyncio.Task[bytes]] = {}
        self._one = asyncio.Lock()
        self._rests_until = 0.0

    async def page(self, openmetrics: bool) -> bytes:
        """Returns what is measured from now on, in Prometheus' text format or in OpenMetrics'."""
        if openmetrics not in self._next:
            self._next[openmetrics] = asyncio.create_task(self._made(openmetrics))
        return await asyncio.shield(self._next[openmetrics])

    async def _made(self, openmetrics: bool) -> bytes:
        async with self._one:
            await asyncio.sleep(self._rests_until - time.monotonic())
            del self._next[openmetrics]
            others = await self._peers.others_metrics(openmetrics)
            page, seconds = await asyncio.to_thread(self._merged, others, self._engines(), openmetrics)
            self._rests_until = time.monotonic() + REST * seconds
            return page

    def _merged(
        self, others: dict[GatewayId, bytes], engines: Sequence[Lifecycle], openmetrics: bool
    ) -> tuple[bytes, float]:
        """The page, and the seconds of a processor that it took."""
        began = time.thread_time()
        pages = {self._peers.own: self._peers.own_metrics_page(openmetrics), **others}
        page = MergedPages(pages, engines).text(openmetrics)
        return page, time.thread_time() - began


def _life(message: Lifecycle) -> GatewayRun:
    return GatewayRun(GatewayId(message.instance), message.incarnation)
