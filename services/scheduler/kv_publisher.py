"""Tells the coordinators which blocks this engine holds: changes gathered for a moment, and dumps for who asks."""

from __future__ import annotations

import asyncio
import logging

from services.scheduler import metrics
from services.scheduler.core.engine import Engine
from services.scheduler.core.serving import Serving
from shared import topics
from shared.bus import Bus
from shared.ids import InstanceId
from shared.kv_journal import KvJournal
from shared.messages.kv_events import DumpRequest, KvSource

log = logging.getLogger(__name__)

PAUSE = 0.025
"""Seconds for which changes are gathered: steps may come faster, and whoever places requests need not know sooner."""

MAX_ASKERS = 64
"""Coordinators that wait for a dump; another one asks again."""


class KvPublisher:
    """Owns the journal of the present epoch, and who waits for a dump. One task publishes, so all keeps its order."""

    def __init__(self, bus: Bus, instance: InstanceId) -> None:
        self._bus = bus
        self._instance = instance
        self._serving: Serving | None = None
        self._journal: KvJournal | None = None
        self._askers: dict[InstanceId, None] = {}
        self._wanted = asyncio.Event()

    def look(self, engine: Engine) -> None:
        """Called after each event of the core, so it costs next to nothing."""
        if engine.serving is not self._serving:
            self._begin(engine)
        if self._journal is not None and self._journal.pending:
            self._wanted.set()

    def asked(self, request: DumpRequest) -> None:
        if len(self._askers) < MAX_ASKERS:
            self._askers[request.asker] = None
            self._wanted.set()

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            await asyncio.sleep(PAUSE)
            self._wanted.clear()
            await self._publish()

    def _begin(self, engine: Engine) -> None:
        """A new epoch: nothing that was held before is there."""
        self._serving, self._journal = engine.serving, None
        report = engine.report()
        if self._serving is None or report is None:
            return
        source = KvSource(instance=self._instance, model=report.model.name, node=report.node)
        self._journal = KvJournal(source, self._serving.steps.epoch, self._serving.planner.memory.index.changes)

    async def _publish(self) -> None:
        journal, serving = self._journal, self._serving
        if journal is None or serving is None:
            return
        askers, self._askers = list(self._askers), {}
        events = journal.flush()
        dump = journal.dump(serving.planner.memory.index.block_of.keys()) if askers else []
        for event in events:
            metrics.KV_EVENTS.inc()
            await self._bus.publish(topics.kv_events(self._instance), event)
        for asker in askers:
            log.info("dump", extra={"asker": asker, "parts": len(dump)})
            for part in dump:
                await self._bus.publish(topics.kv_dumps(asker), part)
