"""Makes the events by which coordinators know what the store holds, model by model. No bus: the actor publishes
them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Protocol

from shared.blocks import BlockHash
from shared.ids import Incarnation, InstanceId, ModelName, NodeId
from shared.kv_events.stream import KvEventStream
from shared.messages.kv_events import KvDump, KvEvents, KvSource


class CommittedBlocks(Protocol):
    """Which full blocks are committed, by the fingerprint of their layout."""

    def held(self, layout: str) -> Iterable[BlockHash]:
        """The hashes of full, committed blocks of one layout."""

    def holds(self, layout: str, name: BlockHash) -> bool:
        """Whether a full block of this name is committed in one layout."""


class KvAnnouncer:
    """Owns one event stream for each model. A block counts as held while any of the model's layouts holds it.

    Which model a layout belongs to is known once an engine has attached it in this process's time; what is held by then
    is published then. Partial blocks, which one request hands over, are not published.
    """

    def __init__(self, instance: InstanceId, node: NodeId, epoch: Incarnation, holdings: CommittedBlocks) -> None:
        self._instance, self._node, self._epoch = instance, node, epoch
        self._holdings = holdings
        self._streams: dict[ModelName, KvEventStream] = {}
        self._layouts: defaultdict[ModelName, set[str]] = defaultdict(set)

    def serve(self, layout: str, model: ModelName) -> None:
        """From now on the layout's blocks are this model's."""
        if layout in self._layouts[model]:
            return
        if model not in self._streams:
            source = KvSource(instance=self._instance, model=model, node=self._node, store=True)
            self._streams[model] = KvEventStream(source, self._epoch)
        for name in self._holdings.held(layout):
            self._note(model, layout, name, there=True)
        self._layouts[model].add(layout)

    def forget(self, layout: str) -> None:
        """The layout is about to go, with all its blocks."""
        for name in self._holdings.held(layout):
            self.gone(layout, name, full=True)
        for layouts in self._layouts.values():
            layouts.discard(layout)

    def stored(self, layout: str, name: BlockHash, *, full: bool) -> None:
        """A block, `full` or partial, was committed in this layout."""
        self._changed(layout, name, full=full, there=True)

    def gone(self, layout: str, name: BlockHash, *, full: bool) -> None:
        """A committed block, `full` or partial, left this layout."""
        self._changed(layout, name, full=full, there=False)

    @property
    def pending(self) -> bool:
        """Whether a flush would say anything."""
        return any(stream.pending for stream in self._streams.values())

    def flush(self) -> list[KvEvents]:
        """The events since the last flush, to be published in this order."""
        return [event for stream in self._streams.values() for event in stream.flush()]

    def dumps(self) -> Iterator[KvDump]:
        """The parts of dumps of all that is held now, of every model. Only right behind a flush, whose events are to be
        published first."""
        dumps = [stream.dump(self._held(self._layouts[model])) for model, stream in self._streams.items()]
        return chain.from_iterable(dumps)

    def _held(self, layouts: set[str]) -> Iterable[BlockHash]:
        """Each block once."""
        if len(layouts) == 1:
            return self._holdings.held(*layouts)
        return set().union(*map(self._holdings.held, layouts))

    def _changed(self, layout: str, name: BlockHash, *, full: bool, there: bool) -> None:
        if not full:
            return
        for model, layouts in self._layouts.items():
            if layout in layouts:
                self._note(model, layout, name, there)

    def _note(self, model: ModelName, layout: str, name: BlockHash, there: bool) -> None:
        if any(self._holdings.holds(other, name) for other in self._layouts[model] if other != layout):
            return
        changes = self._streams[model].changes
        changes.stored(name) if there else changes.removed(name)
