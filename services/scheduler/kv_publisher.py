"""Publishes to coordinators which blocks this engine holds: batched changes, and dumps on request."""

from __future__ import annotations

import asyncio
import logging

from services.scheduler import metrics
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.epoch import EpochState
from shared import topics
from shared.bus import Bus
from shared.ids import InstanceId
from shared.kv_event_stream import KvEventStream
from shared.messages.kv_events import KvDumpRequest, KvSource

log = logging.getLogger(__name__)

PAUSE = 0.025
"""Seconds for which changes are gathered: steps may come faster, and coordinators need not know sooner."""

MAX_ASKERS = 64
"""Coordinators that wait for a dump; another one asks again."""


class KvPublisher:
    """Owns the numbered stream of block events of the present epoch, and which coordinators wait for a dump. One task
    publishes, so everything keeps its order."""

    def __init__(self, bus: Bus, instance: InstanceId) -> None:
        self._bus = bus
        self._instance = instance
        self._state: EpochState | None = None
        self._stream: KvEventStream | None = None
        self._askers: dict[InstanceId, None] = {}
        self._wanted = asyncio.Event()

    def update(self, engine: EngineCore) -> None:
        """Called after each event of the core, so it costs next to nothing."""
        if engine.epoch_state is not self._state:
            self._start_epoch(engine)
        if self._stream is not None and self._stream.changes.changed:
            self._wanted.set()

    def request_dump(self, request: KvDumpRequest) -> None:
        """Sends the asker everything that is held, soon; beyond MAX_ASKERS it is ignored, and asks again."""
        if len(self._askers) < MAX_ASKERS:
            self._askers[request.coordinator] = None
            self._wanted.set()

    async def run(self) -> None:
        """Publishes until it is cancelled."""
        while True:
            await self._wanted.wait()
            await asyncio.sleep(PAUSE)
            self._wanted.clear()
            await self._publish()

    def _start_epoch(self, engine: EngineCore) -> None:
        """A new epoch: nothing that was held before is there."""
        state = self._state = engine.epoch_state
        self._stream = None
        if state is not None:
            source = KvSource(instance=self._instance, model=state.workers.card.name, node=engine.role.node)
            self._stream = KvEventStream(source, state.steps.epoch, state.memory.index.changes)
            self._wanted.set()

    async def _publish(self) -> None:
        stream, state = self._stream, self._state
        if stream is None or state is None:
            return
        askers, self._askers = list(self._askers), {}
        events = stream.flush()
        dump = stream.dump(state.memory.index.block_of.keys()) if askers else []
        for event in events:
            metrics.KV_EVENTS.inc()
            await self._bus.publish(topics.kv_events(self._instance), event)
        for asker in askers:
            log.info("dump sent", extra={"asker": asker, "parts": len(dump)})
            for part in dump:
                await self._bus.publish(topics.kv_dumps(asker), part)
