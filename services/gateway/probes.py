"""Asks engines after silent requests without holding up the gateway's inbox meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from services.gateway.core.effects import Ask
from services.gateway.core.supervision import NoAnswer
from shared import topics
from shared.bus import Bus, BusError, NoResponders
from shared.messages.scheduler import ProbeReply

ANSWER_TIMEOUT = 1.0


class Probes:
    """Owns the questions: one for each open request at the most, so that the queue is bounded by their number."""

    def __init__(self, bus: Bus, answered: Callable[[Ask, ProbeReply | NoAnswer], Awaitable[None]]) -> None:
        self._bus, self._answered = bus, answered
        self._asked: asyncio.Queue[Ask] = asyncio.Queue()

    def ask(self, ask: Ask) -> None:
        self._asked.put_nowait(ask)

    async def run(self) -> None:
        """Asks until it is cancelled. What a question raises, a bug, is raised here."""
        async with asyncio.TaskGroup() as questions:
            while True:
                questions.create_task(self._ask(await self._asked.get()))

    async def _ask(self, ask: Ask) -> None:
        answer: ProbeReply | NoAnswer
        try:
            answer = await self._bus.ask(topics.engine_probes(ask.engine), ask.probe, ProbeReply, ANSWER_TIMEOUT)
        except NoResponders:
            answer = "nobody there"
        except BusError:
            answer = "no answer in time"
        await self._answered(ask, answer)
