"""Lets requests in a few at a time, so that a crowd of them does not hold up the tokens of open streams.

Reading a request and sending it on takes the event loop about half a millisecond, and clients that ended together come
back together: 200 of them would leave all other streams without tokens for a tenth of a second.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """Owns the line of those who wait, which is no longer than there may be connections. First come, first in."""

    def __init__(self, most: int) -> None:
        """`most`: how many are let in during one turn of the event loop."""
        self._most = self._left = most
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def enter(self) -> None:
        """Returns at once while there is no crowd."""
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn)
        if self._left and not self._waiting:
            self._left -= 1
            return
        mine = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _turn(self) -> None:
        """Everything that lay ready has been run since the last time: tokens, too."""
        self._turning = bool(self._waiting)
        self._left = self._most
        while self._left and self._waiting:
            mine = self._waiting.popleft()
            if not mine.done():  # else whoever waited was cancelled
                mine.set_result(None)
                self._left -= 1
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)
