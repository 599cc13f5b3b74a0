"""The hosts of a stack tell each other that they are there; the first one also lets new ones in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from deploy.supervisor.checkpoints.peers import PeerAddress
from deploy.supervisor.core.events import Event
from deploy.supervisor.core.supervisor import Supervisor
from deploy.supervisor.spec import ClusterSpec, StackSpec
from shared import topics
from shared.bus import Bus, BusError
from shared.ids import Incarnation, NodeId, new_incarnation
from shared.messages.supervisor import HostReport

log = logging.getLogger(__name__)

REPORT_EVERY = 1.0
SILENCE_SECONDS = 5.0
"""Without a report after which a host counts as gone, and may join again. Its engines count as gone much earlier."""


class _HostRecord(NamedTuple):
    address: str
    incarnation: Incarnation
    seen_at: float
    model_port: int


class HostPresence:
    """Owns which other hosts are there. Time is that of the bus's liveness clock."""

    def __init__(self) -> None:
        self._heard: dict[NodeId, _HostRecord] = {}

    def record_report(self, report: HostReport, now: float) -> bool:
        """Whether the host has come, or has been started anew."""
        before = self._heard.pop(report.node, None)
        if not report.ending:
            self._heard[report.node] = _HostRecord(report.address, report.incarnation, now, report.model_port)
        return not report.ending and (before is None or before.incarnation != report.incarnation)

    def expire(self, now: float) -> list[NodeId]:
        """Forgets the hosts that were silent for too long, and names them."""
        silent = [node for node, heard in self._heard.items() if now - heard.seen_at > SILENCE_SECONDS]
        for node in silent:
            del self._heard[node]
        return silent

    def addresses(self) -> Mapping[NodeId, str]:
        """Of the hosts that are there."""
        return {node: heard.address for node, heard in self._heard.items()}

    def model_servers(self) -> tuple[str, ...]:
        """HOST:PORT where the hosts that are there send their model."""
        return tuple(
            str(PeerAddress(heard.address, heard.model_port)) for heard in self._heard.values() if heard.model_port
        )


class ClusterHosts:
    """Owns this host's reports and what it has heard of the others."""

    def __init__(self, spec: StackSpec, cluster: ClusterSpec, supervisor: Supervisor) -> None:
        self.changed = asyncio.Event()
        """Nothing waits for it: a report a second is enough."""
        self._cluster, self._supervisor = cluster, supervisor
        self._incarnation = new_incarnation()
        self._presence = HostPresence()
        self._server = None
        if cluster.join_port is not None:
            from deploy.supervisor.cluster.join_server import JoinServer  # certificates: 5 MB that others do without

            self._server = JoinServer(spec, cluster, self._presence)

    async def run(self, bus: Bus, handle: Callable[[Event], object], stop: Callable[[], None]) -> None:
        """Reports that this host is there, and lets others in where it is the first; until cancelled."""

        async def heard(report: HostReport) -> None:
            if report.node != self._cluster.node and self._presence.record_report(report, bus.liveness_now()):
                log.info("host is there", extra={"node": report.node, "address": report.address})

        await bus.subscribe(topics.host_reports(), heard)
        async with asyncio.TaskGroup() as tasks:
            if self._server is not None:
                tasks.create_task(self._server.run())
            while True:
                for node in self._presence.expire(bus.liveness_now()):
                    log.warning("host is gone", extra={"node": node})
                await self._report(bus)
                await asyncio.sleep(REPORT_EVERY)

    async def end(self, bus: Bus) -> None:
        """Says that this host ends."""
        await self._report(bus, ending=True)
        with contextlib.suppress(BusError):
            await bus.flush()

    async def _report(self, bus: Bus, *, ending: bool = False) -> None:
        report = HostReport(
            node=self._cluster.node,
            address=self._cluster.address,
            incarnation=self._incarnation,
            instances=tuple(member.process.instance for member in self._supervisor.members()),
            ending=ending,
            model_port=self._cluster.model_port,
        )
        with contextlib.suppress(BusError):
            await bus.publish(topics.host_reports(), report)
