"""Removes what has expired, in every gateway: which of them does it does not matter."""

from __future__ import annotations

import asyncio
import logging

from services.gateway.database.records import MAX_EXPIRED, Database, DatabaseUnavailable

log = logging.getLogger(__name__)

REST = 60.0
"""Seconds between two rounds."""


async def remove_expired(database: Database) -> None:
    """Until it is cancelled."""
    while True:
        await asyncio.sleep(REST)
        if database.untouched:
            continue
        try:
            while await database.delete_expired() == MAX_EXPIRED:
                pass
        except DatabaseUnavailable as error:
            log.warning("expired records stay", extra={"error": str(error)})
