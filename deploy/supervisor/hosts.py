"""Keeps the ranks of engines together that are spread over several hosts: a death on one starts all of them anew.

The first host's supervisor says once a second, and on every start, which starts of which engines there are; the others
run their ranks of just these, and say what became of them. Nothing is lost with a message: the next one says the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

from deploy.supervisor.core.companions import Companions, starts
from deploy.supervisor.core.events import Event, RanksCalled, RanksLost
from deploy.supervisor.core.fleet import Fleet
from deploy.supervisor.orders import Orders
from deploy.supervisor.spec import StackSpec
from shared import topics
from shared.bus import Bus, BusError
from shared.ids import EngineId
from shared.messages.supervisor import EngineRanks, RanksHeld, RanksWanted
from shared.topics import Topic

log = logging.getLogger(__name__)

SAY_EVERY = 1.0

Handle = Callable[[Event], object]


class Hosts(Protocol):
    changed: asyncio.Event
    """Something has started or ended here: the others are told at once."""

    async def run(self, bus: Bus, handle: Handle, stop: Callable[[], None]) -> None:
        """Until cancelled."""

    async def end(self, bus: Bus) -> None:
        """The stack has ended."""


def hosts_of(spec: StackSpec, fleet: Fleet, orders: Orders) -> Hosts | None:
    """None where there is only this one."""
    if spec.counts.hosts == 1:
        return None
    return FirstHost(orders) if spec.counts.leads else OtherHost(spec.counts.host, fleet, orders)


class FirstHost:
    """Owns what is known of the others."""

    def __init__(self, orders: Orders) -> None:
        self.changed = asyncio.Event()
        self._orders = orders
        self._companions = Companions()

    async def run(self, bus: Bus, handle: Handle, stop: Callable[[], None]) -> None:
        async def heard(report: RanksHeld) -> None:
            self._lost(self._companions.heard(report, self._orders.rendezvous, bus.liveness_now()), handle)

        await bus.subscribe(topics.ranks_held(), heard)
        while True:
            self._lost(self._companions.silent(self._orders.rendezvous, bus.liveness_now()), handle)
            await _say(bus, topics.ranks_wanted(), RanksWanted(starts(self._orders.rendezvous)))
            await _moment(self.changed)

    async def end(self, bus: Bus) -> None:
        await _say(bus, topics.ranks_wanted(), RanksWanted((), ending=True))
        with contextlib.suppress(BusError):
            await bus.flush()

    def _lost(self, engines: list[EngineId], handle: Handle) -> None:
        for engine in engines:
            log.error("ranks on another host were lost", extra={"engine": engine})
            handle(RanksLost(engine))


class OtherHost:
    """Owns nothing: does what the first one says."""

    def __init__(self, number: int, fleet: Fleet, orders: Orders) -> None:
        self.changed = asyncio.Event()
        self._number = number
        self._fleet = fleet
        self._orders = orders

    async def run(self, bus: Bus, handle: Handle, stop: Callable[[], None]) -> None:
        async def wanted(message: RanksWanted) -> None:
            if message.ending and not self._fleet.stopping:
                log.info("the first host has ended")
                stop()
            for engine in message.engines:
                self._orders.rendezvous[engine.engine] = engine.rendezvous
                handle(RanksCalled(engine.engine, engine.rendezvous))

        await bus.subscribe(topics.ranks_wanted(), wanted)
        while True:
            await _say(bus, topics.ranks_held(), self._held())
            await _moment(self.changed)

    async def end(self, bus: Bus) -> None:
        await _say(bus, topics.ranks_held(), RanksHeld(self._number, (), ()))

    def _held(self) -> RanksHeld:
        running: list[EngineRanks] = []
        lost: list[EngineRanks] = []
        for engine, rendezvous, lives in self._fleet.answered():
            (running if lives else lost).append(EngineRanks(engine, rendezvous))
        return RanksHeld(self._number, tuple(running), tuple(lost))


async def _say(bus: Bus, topic: Topic[Any], message: RanksWanted | RanksHeld) -> None:
    with contextlib.suppress(BusError):
        await bus.publish(topic, message)


async def _moment(changed: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SAY_EVERY):
            await changed.wait()
    changed.clear()
