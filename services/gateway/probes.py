"""Asks engines after silent requests without holding up the gateway's inbox meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from services.gateway.core.effects import Ask
from services.gateway.core.supervision import NoAnswer
from shared import topics
from shared.bus import AnswerError, AnswerTimeout, Bus, BusError, NoResponders
from shared.messages.scheduler import ProbeReply

ANSWER_TIMEOUT = 1.0


class Probes:
    """Owns the questions under way: one for each open request at the most."""

    def __init__(self, bus: Bus, answered: Callable[[Ask, ProbeReply | NoAnswer], Awaitable[None]]) -> None:
        self._bus, self._answered = bus, answered
        self._tasks: set[asyncio.Task[None]] = set()
        self._bugs: list[BaseException] = []

    def ask(self, ask: Ask) -> None:
        task = asyncio.create_task(self._ask(ask))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def _ask(self, ask: Ask) -> None:
        answer: ProbeReply | NoAnswer
        try:
            answer = await self._bus.ask(topics.engine_probes(ask.engine), ask.probe, ProbeReply, ANSWER_TIMEOUT)
        except NoResponders:
            answer = "nobody there"
        except (AnswerTimeout, AnswerError, BusError):
            answer = "no answer in time"
        await self._answered(ask, answer)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._bugs.append(bug)

    def raise_bugs(self) -> None:
        """A bug in a question ends the process like one in the actor itself."""
        if self._bugs:
            raise self._bugs.pop()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
