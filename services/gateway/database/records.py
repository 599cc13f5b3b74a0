"""The interface of a database: records by kind and id, each with contents in chunks. Knows not what they mean.

A record belongs to an owner, ends at a time, and has a version: `replace` writes only over the version that was read,
so of two gateways that change a record at once one has to read it again. A record with a `due` time is work: `claim`
gives it to one gateway at a time, and moves `due` on by the length of its lease. Whoever stops renewing it loses it to
the next one that asks. Times are those of the callers' clocks, so the hosts of a stack have to agree on the time within
a fraction of a lease.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

CHUNK_BYTES = 256 * 2**10
"""Size of the chunks that large contents are cut into."""
READ_BYTES = 2**20
"""Bytes of contents that one reading returns, where it finds more than one chunk."""
MAX_READ_CHUNKS = 1024
MAX_LISTED = 1000
"""Records of a page at most."""
MAX_REMOVED = 100
"""Records that one `delete_expired`, or `delete_oldest`, removes."""
REMOVED_BYTES = 64 * 2**20
"""Bytes of contents that one of them removes where it locks others out meanwhile, but for one record alone."""

Hold = Callable[[int], Awaitable[None]]
"""Waits for room for so many bytes that are to be read; raises RequestError."""


class DatabaseUnavailable(Exception):
    """The database does not answer, or has no room; the text says why, without password."""


class RecordUnknown(Exception):
    """There is no such record, or it has expired."""


class Record(Struct, frozen=True, kw_only=True):
    """One record; frozen: `replace` returns the next version."""

    kind: str
    id: str
    owner: str
    """Name of the API key that it belongs to; empty where there are no keys."""
    created: float
    """Seconds since the epoch."""
    expires: float | None = None
    """From then on nobody finds it, and `delete_expired` removes it with its contents; None: it stays."""
    value: bytes
    """What it says, usually JSON; it is read and written as a whole."""
    size: int = 0
    """Bytes of its contents, as its writer counts them."""
    due: float | None = None
    """From when on it can be claimed; None: never."""
    holder: str = ""
    """Who has claimed it."""
    version: int = 1

    def changed(self, **fields: object) -> Record:
        """The record with other fields."""
        return msgspec.structs.replace(self, **fields)


class Usage(NamedTuple):
    """What one owner has of one kind."""

    records: int
    size: int
    """Bytes of their contents together."""

    def with_one(self, size: int) -> Usage:
        """Returns this and one more record, of so many bytes."""
        return Usage(self.records + 1, self.size + size)


class RecordLimits(NamedTuple):
    """What one owner may have of one kind."""

    records: int
    size: int = 2**62
    """Bytes; more than there can be where only the number is bounded."""

    def hold(self, usage: Usage) -> bool:
        """Returns whether an owner may have so much."""
        return usage.records <= self.records and usage.size <= self.size


class Database(ABC):
    """Every operation is one transaction, ends within a few seconds, leaves the event loop free, and raises
    DatabaseUnavailable. Nothing is opened before the first one."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        self._clock = clock

    @property
    def untouched(self) -> bool:
        """Whether it is certain, without opening it, that nothing was ever written to it."""
        return False

    @abstractmethod
    async def insert(self, record: Record) -> bool:
        """Adds a record; False where there is one of this kind and id already."""

    @abstractmethod
    async def insert_within(self, record: Record, limits: RecordLimits) -> Usage | None:
        """Adds a record, whose id must be new, unless its owner would have more of its kind than the limits then: what
        the owner has is returned in this case. Of those that are added at once none passes the limits."""

    @abstractmethod
    async def get(self, kind: str, id: str) -> Record | None:
        """The record; None where there is none."""

    @abstractmethod
    async def value_size(self, kind: str, id: str) -> int:
        """How many bytes a record says, before they are read; 0 where there is none."""

    @abstractmethod
    async def replace(self, record: Record) -> Record | None:
        """Writes value, size, expires, due and holder over the version that `record` has, and returns the next version.
        None where that version is gone: read it again."""

    @abstractmethod
    async def delete(self, kind: str, id: str) -> bool:
        """Removes the record and its contents; whether there was one."""

    @abstractmethod
    async def page(
        self, kind: str, owner: str, *, limit: int, after: str | None = None, newest_first: bool = True
    ) -> list[Record]:
        """The owner's records by their time and id, at most `MAX_LISTED`; those behind the record `after`. Raises
        RecordUnknown where that is none of them."""

    @abstractmethod
    async def usage(self, kind: str, owner: str) -> Usage:
        """How many records of a kind the owner has, expired ones included until they are removed."""

    @abstractmethod
    async def claim(self, kind: str, holder: str, lease: float) -> Record | None:
        """Gives the record that has been due for longest to `holder` for `lease` seconds; None where none is due."""

    @abstractmethod
    async def add_chunks(self, kind: str, id: str, chunks: Mapping[int, bytes], version: int | None = None) -> int:
        """Adds contents to a record, each piece at a position of its own; how many were added. A position that has a
        chunk keeps it: what two gateways write is there once. With `version` nothing is added once the record has
        another one, so that whoever replaces it keeps older writers out. Raises RecordUnknown, then too."""

    @abstractmethod
    async def chunks(
        self, kind: str, id: str, after: int = -1, max_bytes: int = READ_BYTES
    ) -> Sequence[tuple[int, bytes]]:
        """The next chunks behind a position, in order, with their positions: one at least, and no more than `max_bytes`
        in all. Empty behind the last one."""

    @abstractmethod
    async def positions(self, kind: str, id: str) -> Sequence[int]:
        """Where a record has chunks, in order."""

    @abstractmethod
    async def delete_expired(self, now: float) -> int:
        """Removes some of the records that have expired by then, with their contents; how many: 0 when none is left."""

    @abstractmethod
    async def delete_oldest(self, kind: str, owner: str, limits: RecordLimits) -> int:
        """Removes the owner's oldest records of a kind, but none with a `due` time, until the limits hold, or
        some of them, with their contents; how many: 0 when nothing is left to do. Of those that do so at once, each
        removes what is still too much."""

    async def shrink(self) -> bool:
        """Gives some of the disk that nothing uses any more back to the system; whether there is more of it."""
        return False

    @abstractmethod
    async def close(self) -> None:
        """Ends its connections."""

    def _is_valid(self, record: Record) -> bool:
        return record.expires is None or record.expires > self._clock()
