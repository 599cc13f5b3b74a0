"""Keeps what each owner has of one kind within limits: the oldest records go first."""

from __future__ import annotations

from collections import Counter

from services.gateway.database.records import Database, RecordLimits

CHECK_EVERY = 32
"""A gateway looks so rarely how much an owner has, in additions that it has made for it."""
UNSEEN_BYTES = 16 * 2**20
"""Or in so many bytes of them: a few large ones are as much as thousands."""


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
    """Has what is above the limits removed, now and then: by the database, so that gateways that do so at once do not
    each remove as much."""

    def __init__(self, database: Database, kind: str, limits: RecordLimits) -> None:
        self._database, self._kind, self._limits = database, kind, limits
        self._additions = Additions()

    async def added(self, owner: str, size: int) -> None:
        """One more was added, of so many bytes: removes the oldest where it is time to look, but nothing that is still
        worked on. Raises DatabaseUnavailable."""
        if self._additions.begin(owner, size):
            self._additions.looked(owner)
            while await self._database.delete_oldest(self._kind, owner, self._limits):
                pass
        self._additions.end(owner)
