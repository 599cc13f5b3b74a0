"""Asks the node's KV store without holding up the scheduler's inbox."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from services.scheduler.core.events import AskStore, StoreAnswered
from shared import topics
from shared.bus import Bus, BusError
from shared.ids import NodeId
from shared.messages.kvstore import KvStoreAnswer

log = logging.getLogger(__name__)

MOST_ASKED = 1024
"""Questions on their way, a bound that the core's own keep far below. What is above is answered by nobody."""


class StoreQuestions:
    """Owns the questions that are on their way to one node's store."""

    def __init__(self, bus: Bus, node: NodeId, answered: Callable[[StoreAnswered], Awaitable[None]]) -> None:
        self._bus, self._node, self._answered = bus, node, answered
        self._asked: asyncio.Queue[AskStore] = asyncio.Queue()
        self._under_way = 0

    def ask(self, ask: AskStore) -> None:
        self._asked.put_nowait(ask)

    async def run(self) -> None:
        """Asks until it is cancelled. What an answer raises in the core, a bug, is raised here."""
        async with asyncio.TaskGroup() as questions:
            while True:
                questions.create_task(self._ask(await self._asked.get()))

    async def _ask(self, ask: AskStore) -> None:
        self._under_way += 1
        try:
            answer = None if self._under_way > MOST_ASKED else await self._answer(ask)
        finally:
            self._under_way -= 1
        await self._answered(StoreAnswered(ask.question, answer))

    async def _answer(self, ask: AskStore) -> KvStoreAnswer | None:
        topic = topics.kvstore_questions(self._node)
        try:
            answer: KvStoreAnswer = await self._bus.ask(topic, ask.question, KvStoreAnswer, ask.timeout)
        except BusError as error:
            log.debug("store silent", extra={"asked": type(ask.question).__name__, "error": str(error)})
            return None
        return answer
