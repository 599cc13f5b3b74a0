"""Removes what has expired, in every gateway: which of them does it does not matter."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from services.gateway.database.records import Database, DatabaseUnavailable

log = logging.getLogger(__name__)

REST = 60.0
"""Seconds between two rounds."""
SHRINK_REST = 0.05
"""Seconds between two pieces of the disk that are given back: others write meanwhile."""

JUMP_SECONDS = 60.0
"""That the clock may gain between two rounds."""
TRUST_SECONDS = 3600.0
"""After which a clock that has jumped ahead is believed: what is removed does not come back once it is put right."""


class ExpiryTime:
    """Owns by how much the clock is believed to be ahead of the monotonic one."""

    def __init__(self, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._monotonic = clock, monotonic
        self._offset = clock() - monotonic()
        self._jumped: float | None = None
        """When the clock was first seen to have jumped ahead."""

    def now(self) -> float:
        """Seconds since the epoch."""
        monotonic = self._monotonic()
        offset = self._clock() - monotonic
        if offset <= self._offset + JUMP_SECONDS:
            self._offset, self._jumped = offset, None
        elif self._jumped is None:
            self._jumped = monotonic
            log.warning(
                "the clock has jumped ahead: nothing is removed by it yet",
                extra={"seconds": round(offset - self._offset)},
            )
        elif monotonic - self._jumped >= TRUST_SECONDS:
            self._offset, self._jumped = offset, None
        return monotonic + self._offset


async def remove_expired(database: Database) -> None:
    """Until it is cancelled."""
    expiry = ExpiryTime()
    while True:
        await asyncio.sleep(REST)
        now = expiry.now()
        if database.untouched:
            continue
        try:
            while await database.delete_expired(now):
                pass
            while await database.shrink():
                await asyncio.sleep(SHRINK_REST)
        except DatabaseUnavailable as error:
            log.warning("expired records stay", extra={"error": str(error)})
