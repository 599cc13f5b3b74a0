"""What every engine and KV store holds, followed by their numbered events; a dump is asked for where one was missed.

Events are hints: engines look for themselves. So a source with a gap still counts as what was heard of it, until its
dump takes that place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from services.coordinator.core.dump_requests import DumpRequests
from services.coordinator.core.prefix_map import PrefixMap, Run, bits_of, keys_of
from shared.ids import Incarnation, InstanceId, ModelName, NodeId
from shared.messages.kv_events import KvDump, KvEvents, KvSource

HELD = 256
"""Events kept while a dump is awaited, to be taken in behind it. Where they do not reach back to it, another is asked
for."""

SWEPT = 8192
"""Blocks looked at in one `tidy`: about two milliseconds."""


class Hits(NamedTuple):
    """Leading blocks of a request that are there already: on an engine's device, in a node's KV store."""

    engines: Mapping[InstanceId, int]
    stores: Mapping[NodeId, int]


class _Key(NamedTuple):
    instance: InstanceId
    model: ModelName


@dataclass(slots=True)
class _Dump:
    """One that is coming in, part by part."""

    epoch: Incarnation
    number: int
    bit: int
    parts: int


@dataclass(slots=True)
class _Stream:
    source: KvSource
    bit: int
    epoch: Incarnation | None = None
    next: int = 0
    complete: bool = False
    """Whether all is known that it holds."""
    dump: _Dump | None = None
    held: deque[KvEvents] = field(default_factory=lambda: deque(maxlen=HELD))


class KvSources:
    """Owns the prefix map, and how far each source's events were followed. Only instances that are alive count."""

    def __init__(self, limit: int) -> None:
        self.map = PrefixMap(limit)
        self.requests = DumpRequests()
        self.gaps = 0
        self.dumps = 0
        """Complete ones, since the start; as `gaps`."""
        self._alive: set[InstanceId] = set()
        self._streams: dict[_Key, _Stream] = {}
        self._by_bit: dict[int, _Stream] = {}
        self._of_model: dict[ModelName, int] = {}
        """The bits of its sources: equal prompts have equal hashes under every model, so each is looked up among its
        own."""

    def __len__(self) -> int:
        return len(self._streams)

    def alive(self, instance: InstanceId) -> None:
        """An engine that serves, or a store: whoever is not known by its events yet is asked for a dump."""
        if instance not in self._alive:
            self._alive.add(instance)
            self.requests.need(instance)

    def gone(self, instance: InstanceId) -> None:
        self._alive.discard(instance)
        self.requests.forget(instance)
        for key in [key for key in self._streams if key.instance == instance]:
            stream = self._streams.pop(key)
            self._drop_dump(stream)
            self._close(stream)

    def events(self, event: KvEvents, now: float) -> None:
        if event.source.instance in self._alive:
            self._take(self._stream(event.source), event)
            self._settle(event.source.instance, now)

    def dumped(self, dump: KvDump, now: float) -> None:
        """One part of a dump. Parts come in order; where one is missing the whole is of no use."""
        if dump.source.instance not in self._alive:
            return
        stream = self._stream(dump.source)
        if not stream.complete and self._begin_or_go_on(stream, dump):
            assert stream.dump is not None
            self.map.add(stream.dump.bit, keys_of(dump.hashes))
            stream.dump.parts += 1
            self.requests.heard(dump.source.instance, now)
            if stream.dump.parts == dump.parts:
                self._finish(stream, stream.dump)
        self._settle(dump.source.instance, now)

    def complete(self, instance: InstanceId) -> bool:
        """Whether all is known of it, up to the newest event that came."""
        streams = [stream for key, stream in self._streams.items() if key.instance == instance]
        return bool(streams) and all(stream.complete for stream in streams)

    def tidy(self) -> None:
        self.map.tidy(SWEPT)

    def hits(self, model: ModelName, hashes: bytes, limit: int) -> Hits:
        """How many of the first `limit` blocks each source of `model` holds; sources that hold none are left out."""
        engines: dict[InstanceId, int] = {}
        stores: dict[NodeId, int] = {}
        for sources, length in self._runs(model, hashes, limit):
            for bit in bits_of(sources):
                source = self._by_bit[bit].source
                if not source.store:
                    engines[source.instance] = length
                elif source.node is not None:
                    stores[source.node] = max(length, stores.get(source.node, 0))
        return Hits(engines, stores)

    def _runs(self, model: ModelName, hashes: bytes, limit: int) -> list[Run]:
        sources = self._of_model.get(model, 0)
        return self.map.runs(sources, keys_of(hashes)[:limit]) if sources else []

    # ---- events

    def _take(self, stream: _Stream, event: KvEvents) -> None:
        same = event.epoch == stream.epoch
        if same and stream.complete and event.number < stream.next:
            return
        if event.cleared or not same:
            self._begin(stream, event)
        elif stream.complete and event.number > stream.next:
            self.gaps += 1
            stream.complete = False
        self.map.remove(stream.bit, keys_of(event.removed))
        self.map.add(stream.bit, keys_of(event.stored))
        stream.next = event.number + 1
        if not stream.complete:
            stream.held.append(event)

    def _begin(self, stream: _Stream, event: KvEvents) -> None:
        """Nothing is held any more of what was. Where the event says that nothing else was, all is known."""
        if event.cleared or (stream.dump is not None and stream.dump.epoch != event.epoch):
            self._drop_dump(stream)
        stream.held.clear()
        self._close(stream)
        self._open(stream, self.map.open())
        stream.epoch, stream.complete = event.epoch, event.cleared

    # ---- dumps

    def _begin_or_go_on(self, stream: _Stream, dump: KvDump) -> bool:
        coming = stream.dump
        if dump.part == 0:
            self._drop_dump(stream)
            stream.dump = _Dump(dump.epoch, dump.number, self.map.open(), 0)
            return True
        if coming is None or (coming.epoch, coming.number, coming.parts) != (dump.epoch, dump.number, dump.part):
            self._drop_dump(stream)
            return False
        return True

    def _finish(self, stream: _Stream, dump: _Dump) -> None:
        """The dump takes the place of all that was heard, and events behind it follow."""
        self.dumps += 1
        stream.dump = None
        self._close(stream)
        self._open(stream, dump.bit)
        stream.epoch, stream.next, stream.complete = dump.epoch, dump.number + 1, True
        held = [event for event in stream.held if event.epoch == dump.epoch]
        stream.held.clear()
        for event in held:
            self._take(stream, event)

    def _drop_dump(self, stream: _Stream) -> None:
        if stream.dump is not None:
            self.map.retire(stream.dump.bit)
            stream.dump = None

    # ---- streams

    def _stream(self, source: KvSource) -> _Stream:
        key = _Key(source.instance, source.model)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream(source, 0)
            self._open(stream, self.map.open())
        return stream

    def _open(self, stream: _Stream, bit: int) -> None:
        stream.bit = bit
        self._by_bit[bit] = stream
        self._of_model[stream.source.model] = self._of_model.get(stream.source.model, 0) | bit

    def _close(self, stream: _Stream) -> None:
        del self._by_bit[stream.bit]
        self._of_model[stream.source.model] &= ~stream.bit
        self.map.retire(stream.bit)

    def _settle(self, instance: InstanceId, now: float) -> None:
        """Whether a dump of `instance` is needed, after something was heard of it."""
        if self.complete(instance):
            self.requests.met(instance, now)
        else:
            self.requests.need(instance)
