"""Which block lies in which segment file of the SSD tier, where the next one goes, and what is evicted for it. Pure.

A segment is a file of records of one layout, written once from its beginning to its end and removed as a whole: an SSD
erases in large units, too, and a file system gives a whole file back at once. Evicted is the segment that was read or
written least recently (the region LRU of CacheLib's block cache). Blocks that leave the arena together were used last
at about the same time, so that a segment's blocks are of about the same age.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.core.layout import PAGE
from shared.blocks import HASH_BYTES, BlockHash

MAX_SEGMENT_BYTES = 64 * 2**20
MIN_SEGMENTS = 16
"""Segments that the limit has room for at least, as long as each holds one record: so much is evicted at once."""
FOOTER_BYTES = 64
"""Room in a segment's footer beside the hashes."""


@dataclass(slots=True, eq=False)
class Segment:
    """One file of the tier: `capacity` records of `record_bytes` each, the first of which are written."""

    layout: str
    number: int
    """Unique over all layouts and all lives of the tier; a larger one was made later."""
    record_bytes: int
    capacity: int
    names: list[BlockHash | None] = field(default_factory=list)
    """The block in each written record; None where it is unreadable."""
    used: int = 0
    """Order of use over all segments; larger is more recent."""

    @property
    def is_full(self) -> bool:
        """Whether every record is written."""
        return len(self.names) >= self.capacity

    @property
    def footer_at(self) -> int:
        """Offset of the footer, behind the last record."""
        return PAGE + self.capacity * self.record_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the file, which is taken from the file system when it is made."""
        return self.footer_at + -(-(FOOTER_BYTES + self.capacity * HASH_BYTES) // PAGE) * PAGE

    def offset_of(self, record: int) -> int:
        """Offset of a record in the file."""
        return PAGE + record * self.record_bytes


class RecordPlace(NamedTuple):
    """Where a block's record lies: segment and index."""

    segment: Segment
    record: int
    name: BlockHash


class SegmentRoom(NamedTuple):
    """Where the next records go."""

    segment: Segment
    is_new: bool
    """Its file is still to be made."""
    evicted: Sequence[Segment]
    """Whose files are to be removed first."""


class SegmentIndex:
    """Owns the index of the SSD tier: segments, the blocks in them, the order of their use, and the limit in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Bytes that all files may take together."""
        self.segments: dict[int, Segment] = {}
        self.evictions = 0
        """Number of blocks evicted since the start."""
        self._places: dict[str, dict[BlockHash, RecordPlace]] = {}
        self._open: dict[str, Segment] = {}
        """Per layout the segment that is being filled."""
        self._next_number = 1
        self._uses = 0

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(segment.file_bytes for segment in self.segments.values())

    @property
    def blocks(self) -> int:
        """Number of blocks that can be found."""
        return sum(map(len, self._places.values()))

    # ---- finding

    def has(self, layout: str, name: BlockHash) -> bool:
        """Whether the block is in a segment."""
        return name in self._places.get(layout, ())

    def find(self, layout: str, hashes: Iterable[BlockHash]) -> list[RecordPlace]:
        """The leading run of `hashes` that is here; its segments count as used."""
        places, run = self._places.get(layout, {}), []
        for name in hashes:
            place = places.get(name)
            if place is None:
                break
            run.append(place)
        # The beginning of a chain is used last, as it is of use to more requests than its end.
        for place in reversed(run):
            self._touch(place.segment)
        return run

    def _touch(self, segment: Segment) -> None:
        self._uses += 1
        segment.used = self._uses

    # ---- writing

    def room(self, layout: str, record_bytes: int) -> SegmentRoom | None:
        """Where the next records of this layout go; segments that had to make room are no longer in the index. None
        where the limit has no room for one record."""
        segment = self._open.get(layout)
        if segment is not None and not segment.is_full and segment.record_bytes == record_bytes:
            return SegmentRoom(segment, is_new=False, evicted=())
        made = self._new_segment(layout, record_bytes)
        if made is None:
            return None
        evicted: list[Segment] = []
        taken = self.bytes
        while taken + made.file_bytes > self.limit:
            oldest = min(self.segments.values(), key=lambda each: each.used)
            taken -= oldest.file_bytes
            self.evictions += self.remove(oldest)
            evicted.append(oldest)
        self._next_number += 1
        self.segments[made.number] = self._open[layout] = made
        self._touch(made)
        return SegmentRoom(made, is_new=True, evicted=evicted)

    def _new_segment(self, layout: str, record_bytes: int) -> Segment | None:
        wanted = min(MAX_SEGMENT_BYTES, self.limit // MIN_SEGMENTS)
        # Beside the records: the head, the footer, and what rounds that up to a page.
        per_file = (wanted - 2 * PAGE - FOOTER_BYTES) // (record_bytes + HASH_BYTES)
        made = Segment(layout, self._next_number, record_bytes, max(1, per_file))
        return made if made.file_bytes <= self.limit else None

    def written(self, segment: Segment, names: Iterable[BlockHash]) -> None:
        """The next records of the segment hold these blocks from now on."""
        for name in names:
            self._add(segment, name)
        self._touch(segment)

    def _add(self, segment: Segment, name: BlockHash | None) -> None:
        segment.names.append(name)
        if name is not None:
            self._places.setdefault(segment.layout, {})[name] = RecordPlace(segment, len(segment.names) - 1, name)

    # ---- removing

    def drop(self, place: RecordPlace) -> None:
        """The block is not what was written there: it is not found any more."""
        place.segment.names[place.record] = None
        places = self._places.get(place.segment.layout, {})
        if places.get(place.name) == place:
            del places[place.name]

    def remove(self, segment: Segment) -> int:
        """The file is removed, or is gone; returns how many blocks that could be found were in it. Safe to call
        again."""
        if self.segments.pop(segment.number, None) is None:
            return 0
        if self._open.get(segment.layout) is segment:
            del self._open[segment.layout]
        places = self._places.get(segment.layout, {})
        gone = [name for name in segment.names if name is not None and name in places]
        gone = [name for name in gone if places[name].segment is segment]
        for name in gone:
            del places[name]
        return len(gone)

    # ---- at the start

    def recover(self, found: Iterable[Segment]) -> list[Segment]:
        """Takes in the segments that were found, least recently used first. Returns those for which the limit has no
        room any more, whose files are to be removed."""
        for segment in found:
            self._next_number = max(self._next_number, segment.number + 1)
            self.segments[segment.number] = segment
            names, segment.names = segment.names, []
            for name in names:
                self._add(segment, name)
            self._touch(segment)
            if not segment.is_full:
                self._open[segment.layout] = segment
        over: list[Segment] = []
        for segment in sorted(self.segments.values(), key=lambda each: each.used):
            if self.bytes <= self.limit:
                break
            self.remove(segment)
            over.append(segment)
        return over
