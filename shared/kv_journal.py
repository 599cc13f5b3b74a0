"""What a holder of cached blocks tells the coordinators: changes coalesced and numbered, and dumps for who asks.

Used by engines and by KV stores. No clock and no bus: whoever holds a journal decides when it is flushed. Nothing here
remembers what is held; the holder's own index does, and hands it in for a dump.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shared.blocks import BlockHash
from shared.ids import Incarnation
from shared.messages.kv_events import KvDump, KvEvents, KvSource

MAX_HASHES = 4096
"""In one message, 64 kB: what a coordinator takes in within about a millisecond."""


class KvChanges:
    """Owns what changed since it was taken last. What came and went again in between, or the other way, is no change.

    Never more entries than blocks held then plus blocks held now, so it is bounded by the memory that it tells of.
    """

    __slots__ = ("_changed",)

    def __init__(self) -> None:
        self._changed: dict[BlockHash, bool] = {}
        """True: it is there now, and was not. False: the other way."""

    def __bool__(self) -> bool:
        return bool(self._changed)

    def stored(self, hash_: BlockHash) -> None:
        """`hash_`, which was not held, is held now."""
        if self._changed.pop(hash_, None) is None:
            self._changed[hash_] = True

    def removed(self, hash_: BlockHash) -> None:
        """`hash_`, which was held, is not any more."""
        if self._changed.pop(hash_, None) is None:
            self._changed[hash_] = False

    def take(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """(removed, stored) in the order in which they changed; then nothing has changed."""
        changed, self._changed = self._changed, {}
        return [h for h, there in changed.items() if not there], [h for h, there in changed.items() if there]


class KvJournal:
    """Owns the numbering of one source's events within one epoch.

    The first flush says `cleared` under number 0, so that whoever hears it knows all: an epoch begins with nothing
    held. A holder that begins with blocks (a store that found its arena) reports them as stored before that flush.
    """

    def __init__(self, source: KvSource, epoch: Incarnation, changes: KvChanges | None = None) -> None:
        self.source = source
        self.epoch = epoch
        self.changes = KvChanges() if changes is None else changes
        """Where the holder notes what comes and goes."""
        self._next = 0

    @property
    def pending(self) -> bool:
        """Whether a flush would say anything."""
        return bool(self.changes) or self._next == 0

    def flush(self) -> list[KvEvents]:
        """What is new, in messages of bounded size, to be published in this order."""
        if not self.pending:
            return []
        removed, stored = self.changes.take()
        pieces = [(True, piece) for piece in _cut(removed)] + [(False, piece) for piece in _cut(stored)]
        events = [self._event(b"", b"")] if self._next == 0 else []
        for gone, piece in pieces:
            events.append(self._event(b"", piece) if gone else self._event(piece, b""))
        return events

    def dump(self, held: Collection[BlockHash]) -> list[KvDump]:
        """All that is held, as of the last event. Raises ValueError where a flush must come first."""
        if self.pending:
            raise ValueError("changes are pending: they must be flushed and published before a dump")
        pieces = list(_cut(list(held))) or [b""]
        return [
            KvDump(
                source=self.source,
                epoch=self.epoch,
                number=self._next - 1,
                part=part,
                parts=len(pieces),
                hashes=piece,
            )
            for part, piece in enumerate(pieces)
        ]

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


def _cut(hashes: Sequence[BlockHash]) -> list[bytes]:
    return [b"".join(hashes[start : start + MAX_HASHES]) for start in range(0, len(hashes), MAX_HASHES)]
