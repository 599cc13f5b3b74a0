"""Keeps what each owner has of one kind within limits: the oldest records go first."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from services.gateway.database.records import Database

CHECK_EVERY = 32
"""A gateway looks so rarely how much an owner has, in records that it has added for it."""
UNSEEN_BYTES = 16 * 2**20
"""Or in so many bytes of them: a few large ones are as much as thousands."""
PAGE = 100


class RecordLimits(NamedTuple):
    """What is kept for one owner."""

    records: int
    size: int
    """Bytes."""


class OldestFirst:
    """Owns how many records, and bytes, were added for each owner by this gateway."""

    def __init__(self, database: Database, kind: str, limits: RecordLimits) -> None:
        self._database, self._kind, self._limits = database, kind, limits
        self._added: Counter[str] = Counter()
        self._unseen: Counter[str] = Counter()
        """Bytes of what was added since the last look."""
        self._looking: set[str] = set()
        """Owners of which too much is being removed: of two that remove at once each would remove its own."""

    async def added(self, owner: str, size: int) -> None:
        """One more was added, of so many bytes: removes what is above the limits, now and then. Raises
        DatabaseUnavailable."""
        self._unseen[owner] += size
        due = self._added[owner] % CHECK_EVERY == 0 or self._unseen[owner] >= UNSEEN_BYTES
        if due and owner not in self._looking:
            self._unseen[owner] = 0
            self._looking.add(owner)
            try:
                await self._remove(owner)
            finally:
                self._looking.remove(owner)
        self._added[owner] += 1

    async def _remove(self, owner: str) -> None:
        """Removes the oldest, but nothing that is still worked on."""
        records, size = await self._database.usage(self._kind, owner)
        while records > self._limits.records or size > self._limits.size:
            oldest = await self._database.page(self._kind, owner, limit=PAGE, newest_first=False)
            ended = [record for record in oldest if record.due is None]
            for record in ended:
                if records <= self._limits.records and size <= self._limits.size:
                    return
                await self._database.delete(self._kind, record.id)
                records, size = records - 1, size - record.size
            if not ended:
                return
