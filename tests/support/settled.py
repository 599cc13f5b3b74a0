"""Waits in turns of the event loop instead of seconds: these pass however slow the machine is."""

from __future__ import annotations

import asyncio

_TURNS = 100
"""A message on a bus in memory takes fewer than ten."""


async def settled() -> None:
    """Until all tasks of this loop that wait for each other alone, not for time, files or sockets, have done so."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)
