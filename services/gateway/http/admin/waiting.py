"""Waits until something that operators want has come about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LOOK_EVERY = 0.02
"""Seconds between two looks."""


async def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true within that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(LOOK_EVERY)
    return True
