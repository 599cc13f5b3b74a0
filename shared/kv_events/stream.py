"""What a holder of cached blocks sends to coordinators: coalesced, numbered changes, and dumps on request.

Used by engines and by KV stores. No clock and no bus: the owner of a stream decides when it is flushed. This module
does not store which blocks are held; for a dump, the holder passes them in from its own index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shared.blocks import BlockHash
from shared.ids import Incarnation
from shared.messages.kv_events import KvDump, KvEvents, KvSource

MAX_HASHES = 4096
"""The most hashes in one message, 64 kB: a coordinator handles them within about a millisecond."""


class KvChanges:
    """Owns what changed since it was taken last. A block that came and went in between, or the other way round, has
    not changed.

    Never more entries than blocks held then plus blocks held now, so it is bounded by the memory that it describes.
    """

    __slots__ = ("changed",)

    def __init__(self) -> None:
        self.changed: dict[BlockHash, bool] = {}
        """True: it is there now, and was not. False: the other way."""

    def stored(self, hash_: BlockHash) -> None:
        """`hash_`, which was not held, is held now."""
        if self.changed.pop(hash_, None) is None:
            self.changed[hash_] = True

    def removed(self, hash_: BlockHash) -> None:
        """`hash_`, which was held, is not any more."""
        if self.changed.pop(hash_, None) is None:
            self.changed[hash_] = False

    def take(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """(removed, stored) in the order in which they changed; then nothing has changed."""
        changed, self.changed = self.changed, {}
        return [h for h, there in changed.items() if not there], [h for h, there in changed.items() if there]


class KvEventStream:
    """Owns the numbering of one source's events within one epoch.

    The first flush says `cleared` under number 0, so that its receiver knows everything: an epoch begins with nothing
    held. A holder that begins with blocks (a store that found its arena) reports them as stored before that flush.
    """

    def __init__(self, source: KvSource, epoch: Incarnation, changes: KvChanges | None = None) -> None:
        self.source = source
        self.epoch = epoch
        self.changes = KvChanges() if changes is None else changes
        """The changes that the holder records: blocks stored and removed."""
        self._next = 0

    @property
    def pending(self) -> bool:
        """Whether a flush would say anything."""
        return self._next == 0 or bool(self.changes.changed)

    def flush(self) -> list[KvEvents]:
        """The changes since the last flush, in messages of bounded size, to be published in this order."""
        if not self.pending:
            return []
        removed, stored = self.changes.take()
        events = [self._event(b"", b"")] if self._next == 0 else []
        for start in range(0, len(removed) + len(stored), MAX_HASHES):
            first, last = max(0, start - len(removed)), max(0, start + MAX_HASHES - len(removed))
            events.append(self._event(b"".join(stored[first:last]), b"".join(removed[start : start + MAX_HASHES])))
        return events

    def dump(self, held: Iterable[BlockHash]) -> Iterator[KvDump]:
        """All that is held now, as of the last event, in parts that are made one by one: further changes and flushes
        do not alter them. Raises ValueError where a flush must come first."""
        if self.pending:
            raise ValueError("changes are pending: they must be flushed and published before a dump")
        return self._parts(list(held), self._next - 1)

    def _parts(self, held: Sequence[BlockHash], number: int) -> Iterator[KvDump]:
        parts = max(1, -(-len(held) // MAX_HASHES))
        for part in range(parts):
            hashes = b"".join(held[part * MAX_HASHES : (part + 1) * MAX_HASHES])
            yield KvDump(source=self.source, epoch=self.epoch, number=number, part=part, parts=parts, hashes=hashes)

    def _event(self, stored: bytes, removed: bytes) -> KvEvents:
        number = self._next
        self._next += 1
        return KvEvents(
            source=self.source,
            epoch=self.epoch,
            number=number,
            stored=stored,
            removed=removed,
            cleared=number == 0,
        )
