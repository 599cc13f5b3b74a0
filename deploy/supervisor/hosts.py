"""Keeps the ranks of engines together that are spread over several hosts: a death on one starts all of them anew.

The first host's supervisor announces once a second, and at every start, the current start of each engine; the others
run their ranks of these, and report their status. A lost message does no harm: the next one has the same content.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

from deploy.supervisor.cluster.presence import ClusterHosts
from deploy.supervisor.command_executor import CommandExecutor
from deploy.supervisor.core.events import Event, RanksLost, RanksRequested
from deploy.supervisor.core.other_hosts import OtherHostRanks, started_engines
from deploy.supervisor.core.supervisor import Supervisor
from deploy.supervisor.spec import StackSpec
from shared import topics
from shared.bus import Bus, BusError
from shared.ids import EngineId
from shared.messages.supervisor import EngineRanks, RankAssignment, RankStatus
from shared.topics import Topic

log = logging.getLogger(__name__)

REPORT_INTERVAL = 1.0

Handle = Callable[[Event], object]


class Hosts(Protocol):
    """What a supervisor does with other hosts: for engines whose ranks run on several, or a stack that has several."""

    changed: asyncio.Event
    """Set when something has started or ended here, so that it is reported at once."""

    async def run(self, bus: Bus, handle: Handle, stop: Callable[[], None]) -> None:
        """Exchanges ranks with the other hosts until cancelled."""

    async def end(self, bus: Bus) -> None:
        """Tells the other hosts that this stack has ended."""


def hosts_of(spec: StackSpec, supervisor: Supervisor, executor: CommandExecutor) -> Hosts | None:
    """The exchange with other hosts; None if this is the only host."""
    if spec.cluster is not None:
        return ClusterHosts(spec, spec.cluster, supervisor)
    if spec.counts.hosts == 1:
        return None
    return FirstHost(executor) if spec.counts.leads else OtherHost(spec.counts.host, supervisor, executor)


class FirstHost:
    """Owns what is known of the others."""

    def __init__(self, executor: CommandExecutor) -> None:
        self.changed = asyncio.Event()
        self._executor = executor
        self._others = OtherHostRanks()

    async def run(self, bus: Bus, handle: Handle, stop: Callable[[], None]) -> None:
        """Announces which starts of engines there are, and restarts an engine of which ranks elsewhere were lost; until
        cancelled."""

        async def record_status(report: RankStatus) -> None:
            self._lost(self._others.record_status(report, self._executor.rendezvous, bus.liveness_now()), handle)

        await bus.subscribe(topics.rank_status(), record_status)
        while True:
            self._lost(self._others.silent(self._executor.rendezvous, bus.liveness_now()), handle)
            await _publish(bus, topics.rank_assignments(), RankAssignment(started_engines(self._executor.rendezvous)))
            await _moment(self.changed)

    async def end(self, bus: Bus) -> None:
        """Sends the other hosts a request to end, too."""
        await _publish(bus, topics.rank_assignments(), RankAssignment((), ending=True))
        with contextlib.suppress(BusError):
            await bus.flush()

    def _lost(self, engines: list[EngineId], handle: Handle) -> None:
        for engine in engines:
            log.error("ranks on another host were lost", extra={"engine": engine})
            handle(RanksLost(engine))


class OtherHost:
    """Owns nothing: runs the ranks that the first host announces."""

    def __init__(self, number: int, supervisor: Supervisor, executor: CommandExecutor) -> None:
        self.changed = asyncio.Event()
        self._number = number
        self._supervisor = supervisor
        self._executor = executor

    async def run(self, bus: Bus, handle: Handle, stop: Callable[[], None]) -> None:
        """Starts the ranks that the first host announces, and reports what became of them; until cancelled."""

        async def wanted(message: RankAssignment) -> None:
            if message.ending and not self._supervisor.stopping:
                log.info("the first host has ended")
                stop()
            for engine in message.engines:
                self._executor.rendezvous[engine.engine] = engine.rendezvous
                handle(RanksRequested(engine.engine, engine.rendezvous))

        await bus.subscribe(topics.rank_assignments(), wanted)
        while True:
            await _publish(bus, topics.rank_status(), self._held())
            await _moment(self.changed)

    async def end(self, bus: Bus) -> None:
        """Reports that no ranks are left here."""
        await _publish(bus, topics.rank_status(), RankStatus(self._number, (), ()))

    def _held(self) -> RankStatus:
        running: list[EngineRanks] = []
        lost: list[EngineRanks] = []
        for engine, rendezvous, lives in self._supervisor.answered():
            (running if lives else lost).append(EngineRanks(engine, rendezvous))
        return RankStatus(self._number, tuple(running), tuple(lost))


async def _publish(bus: Bus, topic: Topic[Any], message: RankAssignment | RankStatus) -> None:
    with contextlib.suppress(BusError):
        await bus.publish(topic, message)


async def _moment(changed: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REPORT_INTERVAL):
            await changed.wait()
    changed.clear()
