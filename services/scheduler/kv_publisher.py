"""Which blocks this engine holds, for coordinators: those of its present epoch."""

from __future__ import annotations

from collections.abc import Iterator

from services.scheduler import metrics
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.epoch import EpochState
from shared.bus import Bus
from shared.ids import InstanceId
from shared.kv_events.publisher import KvEventPublisher
from shared.kv_events.stream import KvEventStream
from shared.messages.kv_events import KvDump, KvEvents, KvSource


class EngineKvPublisher(KvEventPublisher):
    """Owns the numbered stream of block events of the present epoch."""

    def __init__(self, bus: Bus, instance: InstanceId) -> None:
        super().__init__(bus, instance, self)
        self._state: EpochState | None = None
        self._stream: KvEventStream | None = None

    def update(self, engine: EngineCore) -> None:
        """Called after each event of the core, so it costs next to nothing."""
        if engine.epoch_state is not self._state:
            self._start_epoch(engine)
        if self._stream is not None and self._stream.changes.changed:
            self.record_change()

    def flush(self) -> list[KvEvents]:
        """As `BlockHolder` has it; nothing while there are no workers."""
        events = [] if self._stream is None else self._stream.flush()
        metrics.KV_EVENTS.inc(len(events))
        return events

    def dumps(self) -> Iterator[KvDump]:
        """As `BlockHolder` has it. It ends early with its epoch: nothing of it is there any more."""
        stream, state = self._stream, self._state
        if stream is None or state is None:
            return iter(())
        return self._while_current(stream, stream.dump(state.memory.index.block_of.keys()))

    def _while_current(self, stream: KvEventStream, parts: Iterator[KvDump]) -> Iterator[KvDump]:
        for part in parts:
            if self._stream is not stream:
                return
            yield part

    def _start_epoch(self, engine: EngineCore) -> None:
        """A new epoch: nothing that was held before is there."""
        state = self._state = engine.epoch_state
        self._stream = None
        if state is not None:
            source = KvSource(instance=self._instance, model=state.workers.card.name, node=engine.role.node)
            self._stream = KvEventStream(source, state.steps.epoch, state.memory.index.changes)
            self.record_change()
