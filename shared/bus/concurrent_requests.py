"""Answers the requests of one subscription beside each other: one that takes long does not hold up the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)

MAX_REQUESTS = 64
"""Requests of a subscription that are answered at a time. The next ones wait in the subscription's queue."""
ANSWER_SECONDS = 60.0
"""Seconds after which a request without an answer is abandoned: its sender no longer waits for it."""


class ConcurrentRequests:
    """Owns the requests that a subscription has taken and not yet answered. They begin in the order of `start`."""

    def __init__(self, limit: int = MAX_REQUESTS, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._room = asyncio.Semaphore(limit)
        self._answer_seconds = answer_seconds
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, answering: Coroutine[Any, Any, None]) -> None:
        """Runs `answering` beside those started before; waits only while `limit` of them are under way.

        After `answer_seconds` it is cancelled. That, and what it raises, is logged: who sent the request has a timeout.
        """
        try:
            await self._room.acquire()
        except BaseException:
            answering.close()
            raise
        task = asyncio.create_task(self._run(answering))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, answering: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self._answer_seconds) as deadline:
                await answering
        except Exception as error:
            if deadline.expired():
                log.error("request abandoned", extra={"seconds": self._answer_seconds})
            else:
                log.exception("request failed", exc_info=error)
        finally:
            self._room.release()

    async def cancel(self) -> None:
        """Ends what is under way, without answers."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
