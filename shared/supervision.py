"""Whether the supervisor of this process lives, by the lock that it holds. Standard library only, so that it is cheap.

A lock goes with its process, however that ends, and needs neither the bus nor a parent that stays.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

POLL_INTERVAL = 1.0
"""Seconds between two looks at the lock."""


def supervisor_lives(lock: Path) -> bool:
    """Whether a process holds the lock; False where the file is gone."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def looks_until_orphaned(lock: Path, timeout: float) -> Iterator[float]:
    """Yields how many seconds to wait before the next look; ends once no supervisor has lived for `timeout` seconds.

    A new supervisor starts the count anew.
    """
    seen = time.monotonic()
    while (missing := time.monotonic() - seen) < timeout:
        yield min(POLL_INTERVAL, timeout - missing)
        if supervisor_lives(lock):
            seen = time.monotonic()


async def orphaned(lock: Path, timeout: float) -> None:
    """Returns once no supervisor has lived for `timeout` seconds."""
    import asyncio  # half of what the keeper's process would hold, which waits otherwise

    for pause in looks_until_orphaned(lock, timeout):
        await asyncio.sleep(pause)
