"""Joins this gateway with those of other clusters: says what its cluster can take, sends requests there, and takes
theirs. It has a connection of its own to a NATS server that other clusters reach; the stack's own bus is not on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from services.gateway.core.remote_clusters import STATUS_SECONDS, ClusterEntry, OwnCluster, RemoteClusters
from services.gateway.engine_prober import PROBE_TIMEOUT
from services.gateway.federation.drain_file import DrainFile, DrainState
from services.gateway.federation.relayed_requests import Output, RelayedRequests, refusal_of
from services.gateway.federation.topics import (
    cluster_requests,
    cluster_statuses,
    cluster_switches,
    relay_control,
    relay_probes,
    relayed_output,
)
from services.gateway.metrics import FORWARDED, RELAYED
from services.gateway.request_table import RequestTable
from shared.bus import Bus, BusError, NoResponders, PayloadTooLarge, Subscription, Undelivered
from shared.ids import ClusterName, EngineId, GatewayId, relay_of
from shared.messages.federation import ClusterRequest, ClusterStatus, SwitchCluster
from shared.messages.gateway import RequestMessage, RequestRejected
from shared.messages.scheduler import Cancel, Probe, ProbeReply
from shared.messages.tokenizer import Tokenize
from shared.topics import Topic

log = logging.getLogger(__name__)

RECONNECT_SECONDS = 1.0
"""From a federation server that did not answer to the next try; the client itself reconnects to one that did."""


class Federation:
    """Owns the connection to the federation's server; `RemoteClusters` owns what is heard over it."""

    def __init__(
        self,
        clusters: RemoteClusters,
        requests: RequestTable,
        connect: Callable[[], Awaitable[Bus]],
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
        drain_file: DrainFile | None = None,
    ) -> None:
        """`clock`: liveness of the stack's own bus, which all deadlines of requests are counted on. `drain_file`: where
        it is remembered whether this cluster is drained."""
        self.clusters, self._requests = clusters, requests
        self._connect, self._clock, self._wall = connect, clock, wall_clock
        self._own: OwnCluster = clusters.own
        self._drain_file = drain_file or DrainFile(None)
        if (left := self._drain_file.read()) is not None:
            clusters.switch(left.drained, left.switched)
        self.relayed = RelayedRequests(clusters.own, requests)
        self._bus: Bus | None = None
        self._intake: Subscription | None = None
        self._accepting = True
        self._move_at: float | None = None
        self._refused: dict[tuple[ClusterName, str], str] = {}
        """As it was last logged."""
        requests.link = self

    # ---- running

    async def run(self) -> None:
        """Takes part until it is cancelled; tries again for ever where the server is away."""
        try:
            while self._bus is None:
                try:
                    self._bus = await self._connect()
                except BusError as error:
                    log.warning("no federation server", extra={"error": str(error)})
                    await asyncio.sleep(RECONNECT_SECONDS)
            await self._subscribe(self._bus)
            while True:
                await self.say_status()
                await asyncio.sleep(STATUS_SECONDS)
        finally:
            if self._bus is not None:
                await self._bus.close()

    async def _subscribe(self, bus: Bus) -> None:
        own = self._own
        bus.on_undelivered(self._record_undelivered)
        await bus.subscribe(relayed_output(own.name, own.gateway), self._record_message)
        await bus.subscribe(relay_control(own.name, own.gateway), self.relayed.cancel)
        await bus.serve(relay_probes(own.name, own.gateway), self._answer_probe)
        await bus.subscribe(cluster_switches(own.name), self.switch)
        await bus.subscribe(cluster_statuses(), self._record_status)
        await self.set_accepting(self._accepting)

    async def set_accepting(self, accepting: bool) -> None:
        """Whether this gateway takes requests of other clusters: not while it drains."""
        self._accepting = accepting
        if accepting and self._intake is None and self._bus is not None:
            self._intake = await self._bus.subscribe(cluster_requests(self._own.name), self._take)
        elif not accepting and self._intake is not None:
            intake, self._intake = self._intake, None
            await intake.stop()

    async def tick(self) -> None:
        """Checks the deadlines; called a few times a second."""
        for relay in self.clusters.expire(self._clock()):
            await self._relay_gone(relay)
        if self._move_at is not None and self._clock() >= self._move_at:
            self._move_at = None
            await self._requests.move_to_others()
            await self.relayed.give_back("the cluster is drained")
        await self.flush_output()
        RELAYED.set(len(self.relayed))

    async def stop(self) -> None:
        """Gives back what is still open here, as the gateway ends."""
        await self.relayed.give_back("its gateway stops")
        await self.flush_output()
        if self._bus is not None:
            with contextlib.suppress(BusError):
                await self._bus.flush()

    # ---- what is heard

    async def say_status(self) -> None:
        """Says what this cluster can take."""
        if self._bus is not None:
            await self._publish(cluster_statuses(), self.clusters.own_status(self._wall()))

    async def _record_status(self, status: ClusterStatus) -> None:
        before = self.clusters.switched
        for relay in self.clusters.record_status(status, self._clock(), self._wall()):
            await self._relay_gone(relay)
        if self.clusters.switched != before:
            self._remember_drain()
        refused = {(each.name, each.address): each.reason for each in self.clusters.listing() if each.reason}
        for key, reason in refused.items():
            if key not in self._refused:
                log.error("cluster refused", extra={"cluster": key[0], "address": key[1], "reason": reason})
        self._refused = refused

    async def _relay_gone(self, relay: EngineId) -> None:
        peer = relay_of(relay)
        if peer is not None:
            log.warning("gateway of another cluster is gone", extra={"cluster": peer[0], "gateway": peer[1]})
            await self.relayed.forget(peer)
        await self._requests.relay_gone(relay)

    async def switch(self, switch: SwitchCluster) -> None:
        """New requests leave this cluster, or stay again; open streams move after a while, where that is wanted."""
        if not self.clusters.switch(switch.drained, switch.switched):
            return
        self._remember_drain()
        log.info("cluster drained" if switch.drained else "cluster undrained", extra={"move_after": switch.move_after})
        self._move_at = None
        if switch.drained and switch.move_after is not None:
            self._move_at = self._clock() + switch.move_after
        await self.say_status()

    def _remember_drain(self) -> None:
        self._drain_file.write(DrainState(self.clusters.drained, self.clusters.switched))

    async def _record_message(self, message: RequestMessage) -> None:
        await self._requests.handle(message)

    async def _record_undelivered(self, message: Undelivered) -> None:
        if isinstance(message.message, ClusterRequest):
            await self._requests.record_unforwarded(message.message.tokenize)

    async def _take(self, forwarded: ClusterRequest) -> None:
        assert self._bus is not None
        await self.relayed.open(self._bus, forwarded, self._refusal(forwarded))

    def _refusal(self, forwarded: ClusterRequest) -> RequestRejected | None:
        reason = self.clusters.refusal(forwarded.cluster, forwarded.address)
        if reason is None and self.clusters.drained:
            reason = f"cluster {self._own.name} is drained"
        if reason is None and not self.clusters.serves(forwarded.tokenize.model):
            reason = f"cluster {self._own.name} has no engine for the model {forwarded.tokenize.model!r}"
        if reason is not None:
            return refusal_of(forwarded, "unavailable", reason)
        return None if self._requests.free > 0 else refusal_of(forwarded, "overloaded", "too many requests are open")

    async def _answer_probe(self, probe: Probe) -> ProbeReply:
        return self.relayed.answer(probe)

    # ---- what the table of requests wants done (`ClusterLink`)

    async def forward(self, cluster: ClusterName, tokenize: Tokenize) -> None:
        """Sends an attempt to a gateway of that cluster; whoever has room takes it."""
        forwarded = ClusterRequest(self._own.name, self._own.address, tokenize)
        FORWARDED.labels(cluster).inc()
        log.info("forwarded", extra={"request": tokenize.request, "attempt": tokenize.attempt, "cluster": cluster})
        if self._bus is None:
            await self._requests.record_unforwarded(tokenize)
            return
        try:
            await self._bus.publish(cluster_requests(cluster), forwarded, confirm=True)
        except PayloadTooLarge as error:
            text = f"the prompt makes {error.size} bytes, the bus takes {error.limit} at most"
            rejected = refusal_of(forwarded, "unavailable", text)
            await self._requests.handle(rejected)

    async def cancel(self, cluster: ClusterName, gateway: GatewayId, cancel: Cancel) -> None:
        """Calls off what a gateway of another cluster has."""
        await self._publish(relay_control(cluster, gateway), cancel)

    async def probe(self, cluster: ClusterName, gateway: GatewayId, probe: Probe) -> ProbeReply:
        """Asks a gateway of another cluster whether it has a request. Raises BusError."""
        if self._bus is None:
            raise NoResponders(relay_probes(cluster, gateway).subject)
        reply: ProbeReply = await self._bus.request(relay_probes(cluster, gateway), probe, ProbeReply, PROBE_TIMEOUT)
        return reply

    def record_output(self, output: Output) -> bool:
        """Takes what came of a request of another cluster; False where it is none."""
        return self.relayed.record(output)

    async def flush_output(self) -> None:
        """Sends what was taken since the last call."""
        if self._bus is not None:
            await self.relayed.flush(self._bus)

    async def _publish(self, topic: Topic[Any], message: Any) -> None:
        if self._bus is None:
            return
        try:
            await self._bus.publish(topic, message)
        except BusError as error:
            log.warning("message not published", extra={"subject": topic.subject, "error": str(error)})

    # ---- for operators

    def listing(self) -> list[ClusterEntry]:
        """This cluster and the others."""
        return self.clusters.listing()

    async def switch_cluster(self, cluster: ClusterName, switch: SwitchCluster) -> None:
        """Sends the switch to every gateway of a cluster, be it this one's. Raises BusError."""
        if self._bus is None:
            raise BusError("the federation server is away")
        await self._bus.publish(cluster_switches(cluster), switch)
