"""Publishes to coordinators which blocks an engine or a KV store holds: changes at a bounded rate, dumps in pieces."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Protocol

from shared import topics
from shared.bus import Bus
from shared.ids import InstanceId
from shared.messages.kv_events import KV_EVENT_SECONDS, KvDump, KvDumpRequest, KvEvents
from shared.messages.lifecycle import HeartbeatInterval

log = logging.getLogger(__name__)

DUMP_PART_SECONDS = 0.025
"""Between two parts of a dump, which have 4,096 blocks each: a coordinator takes in as many in a few milliseconds, and
does its other work between them."""
MAX_ASKERS = 64
"""Coordinators that wait for a dump; another one asks again."""


class BlockHolder(Protocol):
    """Who knows what is held, and what has changed."""

    def flush(self) -> list[KvEvents]:
        """What has changed since the last flush, to be published in this order."""

    def dumps(self) -> Iterator[KvDump]:
        """The parts of all that is held at the time of this call, which comes right behind a flush."""


class KvEventPublisher:
    """Owns when changes are published, and which coordinators wait for a dump.

    However often blocks change, there is one flush for each interval in which any did. Whoever asks for a dump
    shares it with all others that have asked until it begins; those that ask later get the next one.
    """

    def __init__(self, bus: Bus, instance: InstanceId, holder: BlockHolder) -> None:
        self._bus = bus
        self._instance = instance
        self._holder = holder
        self._interval = KV_EVENT_SECONDS
        self._changed = asyncio.Event()
        self._askers: dict[InstanceId, None] = {}
        self._asked = asyncio.Event()
        self._publishing = asyncio.Lock()
        """Held from a flush until its events are published, so that they keep their order."""

    def record_change(self) -> None:
        """Something has changed, or may have: a flush is due, at the end of the interval."""
        self._changed.set()

    def set_interval(self, interval: HeartbeatInterval) -> None:
        """A coordinator has said for how long changes are gathered in a fleet of this size."""
        self._interval = max(KV_EVENT_SECONDS, interval.kv_events)

    def request_dump(self, request: KvDumpRequest) -> None:
        """Sends the asker everything that is held, soon; beyond MAX_ASKERS it is ignored, and asks again."""
        if len(self._askers) < MAX_ASKERS:
            self._askers[request.coordinator] = None
            self._asked.set()

    async def run(self) -> None:
        """Publishes until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish_changes())
            tasks.create_task(self._send_dumps())

    async def _publish_changes(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(self._interval)
            self._changed.clear()
            async with self._publishing:
                await self._publish(self._holder.flush())

    async def _send_dumps(self) -> None:
        while True:
            await self._asked.wait()
            await asyncio.sleep(DUMP_PART_SECONDS)
            async with self._publishing:
                self._asked.clear()
                askers, self._askers = list(self._askers), {}
                # Both at once: a dump holds exactly what the events up to it say.
                events, dumps = self._holder.flush(), self._holder.dumps()
                await self._publish(events)
            await self._send(dumps, askers)

    async def _publish(self, events: Iterable[KvEvents]) -> None:
        for event in events:
            await self._bus.publish(topics.kv_events(self._instance), event)

    async def _send(self, dumps: Iterator[KvDump], askers: list[InstanceId]) -> None:
        parts = 0
        for part in dumps:
            for asker in askers:
                await self._bus.publish(topics.kv_dumps(asker), part)
            parts += 1
            await asyncio.sleep(DUMP_PART_SECONDS)
        log.info("dump sent", extra={"askers": askers, "parts": parts})
