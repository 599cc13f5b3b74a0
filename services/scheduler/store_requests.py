"""Carries requests to the node's KV store without holding up the scheduler's inbox."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from services.scheduler.core.events import SendStoreRequest, StoreReplied
from shared import topics
from shared.bus import Bus, BusError
from shared.ids import NodeId
from shared.messages.kvstore import KvStoreReply

log = logging.getLogger(__name__)

MAX_REQUESTS = 1024
"""Requests in flight, a bound that the core's own bounds stay far below. What is above has no reply."""


class StoreRequests:
    """Owns the requests that are in flight to one node's store."""

    def __init__(self, bus: Bus, node: NodeId, on_reply: Callable[[StoreReplied], Awaitable[None]]) -> None:
        self._bus, self._node, self._on_reply = bus, node, on_reply
        self._unsent: asyncio.Queue[SendStoreRequest] = asyncio.Queue()
        self._in_flight = 0

    def send(self, output: SendStoreRequest) -> None:
        """Sends the request soon; `on_reply` is called with the reply, or with None where there was none in time."""
        self._unsent.put_nowait(output)

    async def run(self) -> None:
        """Sends until it is cancelled. What a reply raises in the core, a bug, is raised here."""
        async with asyncio.TaskGroup() as requests:
            while True:
                requests.create_task(self._exchange(await self._unsent.get()))

    async def _exchange(self, output: SendStoreRequest) -> None:
        self._in_flight += 1
        try:
            reply = None if self._in_flight > MAX_REQUESTS else await self._request(output)
        finally:
            self._in_flight -= 1
        await self._on_reply(StoreReplied(output.request, reply))

    async def _request(self, output: SendStoreRequest) -> KvStoreReply | None:
        topic = topics.kvstore_requests(self._node)
        try:
            reply: KvStoreReply = await self._bus.request(topic, output.request, KvStoreReply, output.timeout)
        except BusError as error:
            log.debug(
                "the KV store did not reply", extra={"request": type(output.request).__name__, "error": str(error)}
            )
            return None
        return reply
