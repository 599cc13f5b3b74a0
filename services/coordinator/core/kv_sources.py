"""Tracks what every engine and KV store holds, by their numbered events; a missed event leads to a dump request.

Events are hints, as an engine looks up its own blocks in any case. So a source with a gap still counts as holding what
its events showed, until its dump takes their place.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import compress, count
from typing import NamedTuple

from services.coordinator.core.prefix_map import PrefixMap, bits_of, flags_of, keys_of
from shared.ids import Incarnation, InstanceId, ModelName, NodeId
from shared.messages.kv_events import KvDump, KvEvents, KvSource
from shared.reliability.retry import Backoff

MAX_HELD_EVENTS = 256
"""Events kept from the request for a dump to its first part. If they do not reach back to it, another is requested."""
MAX_REMOVED = 262_144
"""Blocks that are removed while a dump arrives, and may be in its later parts. With more, another is requested."""
TIDY_BLOCKS = 8192
"""Blocks looked at in one `tidy`: about two milliseconds."""
DUMP_TIMEOUTS = Backoff(first=2.0, longest=32.0)
"""Without a part of a dump for so long the request for it counts as lost; longer with each that is not answered."""
MAX_DUMPS = 4
"""Dumps that are awaited at a time. Each brings 4,096 blocks every 25 ms: four take half of a coordinator's time, which
places requests in between. A source that does not answer keeps others waiting for one timeout."""
DUMP_PAUSE = 0.5
"""Seconds between a whole dump and the next request to the same source."""


class Reuse(NamedTuple):
    """Leading blocks of one request that one engine need not compute, each counted once, where it is nearest."""

    device: int = 0
    """In the engine's own memory."""
    stored: int = 0
    """Beyond those, in the KV store of its node."""
    remote: int = 0
    """Further blocks that lie in the KV store of `remote_node`."""
    remote_node: NodeId | None = None
    """The node with the remote blocks; None if there are none."""
    remote_price: float | None = None
    """What fetching and loading the remote blocks costs, in blocks computed instead; None if that was not measured."""

    @property
    def blocks(self) -> int:
        """Number of blocks that need not be computed, wherever they lie."""
        return self.device + self.stored + self.remote

    def worth(self, discount: float) -> float:
        """In blocks on the device. A block in the node's store is worth `discount` of one. One that has to come from
        another node is worth what it saves beyond its measured price, or `discount` squared where there is none."""
        if self.remote_price is None:
            return self.device + discount * (self.stored + discount * self.remote)
        return self.device + discount * self.stored + max(0.0, self.remote - self.remote_price)


NO_REUSE = Reuse()


class PrefixHits(NamedTuple):
    """How many leading blocks of a request each engine's device and each node's KV store hold."""

    engines: Mapping[InstanceId, int]
    stores: Mapping[NodeId, int]

    def reuses(self, engines: Iterable[tuple[InstanceId, NodeId | None]]) -> list[Reuse]:
        """What each of `engines`, given with its node, need not compute. An engine without a KV store on its node
        (None) can use no store. If several stores hold the most blocks, the first by name counts."""
        best_node, best = min(self.stores.items(), key=lambda item: (-item[1], item[0]), default=(None, 0))
        of_node: dict[NodeId, Reuse] = {}  # for engines that hold nothing themselves, as most do
        reuses = []
        for instance, node in engines:
            device = self.engines.get(instance, 0)
            if node is None:
                reuses.append(Reuse(device))
                continue
            reuse = None if device else of_node.get(node)
            if reuse is None:
                own = max(device, self.stores.get(node, 0))
                remote, remote_node = (best - own, best_node) if best > own else (0, None)
                reuse = Reuse(device, own - device, remote, remote_node)
                if not device:
                    of_node[node] = reuse
            reuses.append(reuse)
        return reuses


class _SourceKey(NamedTuple):
    instance: InstanceId
    model: ModelName


@dataclass(slots=True)
class _DumpInProgress:
    epoch: Incarnation
    number: int
    """Number of the last event that the dump includes."""
    bit: int
    """What the dump and the events behind it show; the source's own bit goes on showing what was known before."""
    next: int
    """The number that the next event must have."""
    parts: int = 0
    """Number of parts received so far."""
    removed: set[int] = field(default_factory=set)
    """Blocks that have gone since, of which later parts do not know; those that came back are there by their event."""


@dataclass(slots=True)
class _SourceStream:
    source: KvSource
    bit: int = 0
    """The source's bit in the prefix map."""
    epoch: Incarnation | None = None
    next: int = 0
    """The number that the source's next event must have."""
    complete: bool = False
    """Whether everything that it holds is known."""
    dump: _DumpInProgress | None = None
    held: deque[KvEvents] = field(default_factory=lambda: deque(maxlen=MAX_HELD_EVENTS))
    """Since the last request for a dump."""


class KvSources:
    """Owns the prefix map, and how far each source's events were followed. Only instances that are alive count."""

    def __init__(self, limit: int) -> None:
        """`limit`: blocks in the prefix map."""
        self.map = PrefixMap(limit)
        self.requests = DumpRequests()
        self.gaps = 0
        """Times that events were missed, since the start."""
        self.dumps = 0
        """Whole dumps received, since the start."""
        self._alive: set[InstanceId] = set()
        self._asked: set[InstanceId] = set()
        """Of which a dump was requested that is not all there."""
        self._streams: dict[_SourceKey, _SourceStream] = {}
        self._by_bit: dict[int, _SourceStream] = {}
        self._names: list[InstanceId] = []
        """By the position of the source's bit, for masks of many; of a free bit what it was."""
        self._stores = 0
        """The bits of KV stores."""
        self._of_model: dict[ModelName, int] = {}
        """The bits of its sources: equal prompts have equal hashes under every model, so each is looked up among its
        own."""

    def __len__(self) -> int:
        return len(self._streams)

    def follow(self, instance: InstanceId) -> None:
        """An engine that serves, or a store, is alive. One whose events were not followed so far needs a dump."""
        if instance not in self._alive:
            self._alive.add(instance)
            self.requests.need(instance)

    def forget(self, instance: InstanceId) -> None:
        """The instance is gone, and all that it held."""
        self._alive.discard(instance)
        self._asked.discard(instance)
        self.requests.forget(instance)
        for key in [key for key in self._streams if key.instance == instance]:
            stream = self._streams.pop(key)
            self._drop_dump(stream)
            self._close(stream)

    def is_complete(self, instance: InstanceId) -> bool:
        """Whether everything that it holds is known, up to the newest event that came."""
        streams = [stream for key, stream in self._streams.items() if key.instance == instance]
        return bool(streams) and all(stream.complete for stream in streams)

    def tidy(self) -> None:
        """Frees some of what sources that are gone left in the prefix map; to be called at leisure."""
        self.map.tidy(TIDY_BLOCKS)

    def hits(self, model: ModelName, hashes: bytes, limit: int) -> PrefixHits:
        """How many of the first `limit` blocks each source of `model` holds; sources that hold none are left out."""
        engines: dict[InstanceId, int] = {}
        stores: dict[NodeId, int] = {}
        of_model = self._of_model.get(model, 0)
        for sources, length in self.map.runs(of_model, keys_of(hashes)[:limit]) if of_model else ():
            engines |= dict.fromkeys(compress(self._names, flags_of(sources & ~self._stores)), length)
            for bit in bits_of(sources & self._stores):
                node = self._by_bit[bit].source.node
                if node is not None:
                    stores[node] = max(length, stores.get(node, 0))
        return PrefixHits(engines, stores)

    # ---- events

    def holders(self, model: ModelName, hashes: bytes) -> list[InstanceId]:
        """The engines and KV stores that hold all of these blocks, as far as they have said so."""
        held = self.map.holders(keys_of(hashes)) & self._of_model.get(model, 0)
        return [self._by_bit[bit].source.instance for bit in bits_of(held)]

    def record_events(self, event: KvEvents, now: float) -> None:
        """Applies one message of events. Ignored where its source is not known to be alive."""
        if event.source.instance in self._alive:
            stream = self._stream(event.source)
            self._apply(stream, event)
            self._check_complete(stream, now)

    def _apply(self, stream: _SourceStream, event: KvEvents) -> None:
        same = event.epoch == stream.epoch
        if same and stream.complete and event.number < stream.next:
            return
        if event.cleared or not same:
            self._begin_epoch(stream, event)
        elif stream.complete and event.number > stream.next:
            self.gaps += 1
            stream.complete = False
        self._change(stream.bit, event)
        stream.next = event.number + 1
        if not stream.complete and event.source.instance in self._asked:
            stream.held.append(event)
        if stream.dump is not None:
            self._follow_dump(stream, stream.dump, event)

    def _change(self, bit: int, event: KvEvents) -> None:
        if event.removed:
            self.map.remove(bit, keys_of(event.removed))
        if event.stored:
            self.map.add(bit, keys_of(event.stored))

    def _begin_epoch(self, stream: _SourceStream, event: KvEvents) -> None:
        """The source holds nothing of what it held. Where the event says that it holds nothing else, all is known."""
        if event.cleared or (stream.dump is not None and stream.dump.epoch != event.epoch):
            self._drop_dump(stream)
        stream.held.clear()
        self._close(stream)
        self._open(stream, self.map.open())
        stream.epoch, stream.complete = event.epoch, event.cleared

    # ---- dumps

    def dumps_due(self, now: float) -> list[InstanceId]:
        """The sources to request a dump from now; each request is recorded as made. The dump will hold all that has
        come by now, so only events that come from now on are kept for it."""
        due = self.requests.due(now)
        if due:
            self._asked.update(due)
            for key, stream in self._streams.items():
                if key.instance in due:
                    stream.held.clear()
        return due

    def record_dump(self, dump: KvDump, now: float) -> None:
        """Applies one part of a dump. Parts come in order; where one is missing the whole dump is of no use."""
        if dump.source.instance not in self._alive:
            return
        stream = self._stream(dump.source)
        progress = None if stream.complete else self._progress_of(stream, dump)
        if progress is not None:
            keys = keys_of(dump.hashes)
            if progress.removed:
                keys = [key for key in keys if key not in progress.removed]
            self.map.add(progress.bit, keys)
            progress.parts += 1
            self.requests.received_part(dump.source.instance, now)
            if progress.parts == dump.parts:
                self._finish_dump(stream, progress)
        self._check_complete(stream, now)

    def _progress_of(self, stream: _SourceStream, dump: KvDump) -> _DumpInProgress | None:
        """What this part continues or begins; None where it does neither, and then the dump before it ends, too."""
        progress = stream.dump
        if dump.part == 0:
            self._drop_dump(stream)
            self._begin_dump(stream, dump)
        elif progress is None or (progress.epoch, progress.number, progress.parts) != (
            dump.epoch,
            dump.number,
            dump.part,
        ):
            self._drop_dump(stream)
        return stream.dump

    def _begin_dump(self, stream: _SourceStream, dump: KvDump) -> None:
        """The events behind it that have come already follow it at once. Where some of them are not there any more it
        is of no use."""
        progress = stream.dump = _DumpInProgress(dump.epoch, dump.number, self.map.open(), dump.number + 1)
        for event in stream.held:
            self._follow_dump(stream, progress, event)
        if stream.epoch == dump.epoch and progress.next < stream.next:
            self._drop_dump(stream)

    def _follow_dump(self, stream: _SourceStream, dump: _DumpInProgress, event: KvEvents) -> None:
        """An event changes what the dump shows, too; a gap makes that useless."""
        if event.epoch != dump.epoch or event.number < dump.next:
            return
        if event.number > dump.next or len(dump.removed) > MAX_REMOVED:
            if stream.dump is dump:
                self._drop_dump(stream)
            return
        dump.next += 1
        self._change(dump.bit, event)
        dump.removed.update(keys_of(event.removed))

    def _finish_dump(self, stream: _SourceStream, dump: _DumpInProgress) -> None:
        """It takes the place of what was known of its source before."""
        self.dumps += 1
        stream.dump = None
        stream.held.clear()
        self._close(stream)
        self._open(stream, dump.bit)
        stream.epoch, stream.next, stream.complete = dump.epoch, dump.next, True

    def _drop_dump(self, stream: _SourceStream) -> None:
        if stream.dump is not None:
            self.map.retire(stream.dump.bit)
            stream.dump = None

    def _check_complete(self, stream: _SourceStream, now: float) -> None:
        """Whether a dump is needed, or needed no more, once something was received of `stream`."""
        instance = stream.source.instance
        if not stream.complete:
            self.requests.need(instance)
        elif instance in self.requests.needed and self.is_complete(instance):
            self._asked.discard(instance)
            self.requests.met(instance, now)

    # ---- streams

    def _stream(self, source: KvSource) -> _SourceStream:
        key = _SourceKey(source.instance, source.model)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _SourceStream(source)
            self._open(stream, self.map.open())
        return stream

    def _open(self, stream: _SourceStream, bit: int) -> None:
        stream.bit = bit
        self._by_bit[bit] = stream
        position = bit.bit_length() - 1
        self._names += [stream.source.instance] * (position + 1 - len(self._names))
        self._names[position] = stream.source.instance
        if stream.source.store:
            self._stores |= bit
        self._of_model[stream.source.model] = self._of_model.get(stream.source.model, 0) | bit

    def _close(self, stream: _SourceStream) -> None:
        del self._by_bit[stream.bit]
        self._of_model[stream.source.model] &= ~stream.bit
        self._stores &= ~stream.bit
        self.map.retire(stream.bit)


@dataclass(slots=True)
class _DumpRequest:
    not_before: float = -math.inf
    """-inf: no dump was requested from it yet."""
    unanswered: int = 0
    """Requests in a row that brought no whole dump."""


class _Turn(NamedTuple):
    """When a source may be asked, for the first time or again. Void once the source has a newer one."""

    at: float
    instance: InstanceId
    number: int


class DumpRequests:
    """Owns when a dump is requested from which source: not while one is arriving, less and less often without a reply,
    and only from MAX_DUMPS at a time, as those of a large fleet are more than a newcomer can take at once."""

    def __init__(self) -> None:
        self.needed: set[InstanceId] = set()
        self.asked = 0
        """Requests, since the start."""
        self._requests: dict[InstanceId, _DumpRequest] = {}
        self._awaited: dict[InstanceId, float] = {}
        """The sources whose dumps are to arrive, and until when that keeps others waiting."""
        self._turns: list[_Turn] = []
        """A heap. What is needed is asked about with each message, so that nobody may look at all sources then."""
        self._numbers: dict[InstanceId, int] = {}
        """The turn that counts, of each source that needs a dump."""
        self._count = count()

    def need(self, instance: InstanceId) -> None:
        """Not everything that it holds is known."""
        request = self._requests.setdefault(instance, _DumpRequest())
        if instance not in self.needed:
            self.needed.add(instance)
            self._queue(instance, request.not_before)

    def received_part(self, instance: InstanceId, now: float) -> None:
        """A part of its dump came; the next one has the full timeout again."""
        until = now + DUMP_TIMEOUTS.first
        self._requests.setdefault(instance, _DumpRequest()).not_before = until
        if instance in self._awaited:
            self._awaited[instance] = until

    def met(self, instance: InstanceId, now: float) -> None:
        """Everything that it holds is known."""
        self._drop(instance)
        self._requests[instance] = _DumpRequest(not_before=now + DUMP_PAUSE)

    def forget(self, instance: InstanceId) -> None:
        """The instance is gone."""
        self._drop(instance)
        self._requests.pop(instance, None)

    def due(self, now: float) -> list[InstanceId]:
        """The sources to request a dump from now, first those that were to be asked first, then by name; each request
        is recorded as made."""
        for instance in [each for each, until in self._awaited.items() if until <= now]:
            del self._awaited[instance]
        due: list[InstanceId] = []
        while self._turns and self._turns[0].at <= now and len(self._awaited) < MAX_DUMPS:
            turn = heappop(self._turns)
            if self._numbers.get(turn.instance) != turn.number:
                continue
            request = self._requests[turn.instance]
            if request.not_before <= now:
                request.not_before = now + DUMP_TIMEOUTS.pause(request.unanswered)
                request.unanswered += 1
                self._awaited[turn.instance] = now + DUMP_TIMEOUTS.first
                due.append(turn.instance)
            self._queue(turn.instance, request.not_before)
        self.asked += len(due)
        return due

    def _queue(self, instance: InstanceId, at: float) -> None:
        number = self._numbers[instance] = next(self._count)
        heappush(self._turns, _Turn(at, instance, number))

    def _drop(self, instance: InstanceId) -> None:
        self.needed.discard(instance)
        self._awaited.pop(instance, None)
        self._numbers.pop(instance, None)
