"""Keeps what each owner has of one kind within limits: the oldest records go first."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from services.gateway.database.records import Database

CHECK_EVERY = 32
"""A gateway looks so rarely how much an owner has, in additions that it has made for it."""
UNSEEN_BYTES = 16 * 2**20
"""Or in so many bytes of them: a few large ones are as much as thousands."""
PAGE = 100


class RecordLimits(NamedTuple):
    """What is kept for one owner."""

    records: int
    size: int
    """Bytes."""


class Additions:
    """Owns how many additions, and bytes, were made for each owner by this gateway."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()
        self._unseen: Counter[str] = Counter()
        """Bytes since it was looked last how much the owner has."""

    def begin(self, owner: str, size: int) -> bool:
        """One of so many bytes is made; whether it is time to look."""
        self._unseen[owner] += size
        return self._count[owner] % CHECK_EVERY == 0 or self._unseen[owner] >= UNSEEN_BYTES

    def looked(self, owner: str) -> None:
        """It is known how much the owner has."""
        self._unseen[owner] = 0

    def end(self, owner: str) -> None:
        """It was made, and looked at where that was due."""
        self._count[owner] += 1


class OldestFirst:
    """Owns whose oldest records this gateway is removing."""

    def __init__(self, database: Database, kind: str, limits: RecordLimits) -> None:
        self._database, self._kind, self._limits = database, kind, limits
        self._additions = Additions()
        self._looking: set[str] = set()
        """Owners of which too much is being removed: of two that remove at once each would remove its own."""

    async def added(self, owner: str, size: int) -> None:
        """One more was added, of so many bytes: removes what is above the limits, now and then. Raises
        DatabaseUnavailable."""
        if self._additions.begin(owner, size) and owner not in self._looking:
            self._additions.looked(owner)
            self._looking.add(owner)
            try:
                await self._remove(owner)
            finally:
                self._looking.remove(owner)
        self._additions.end(owner)

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
