"""Asks engines whether they hold a request, beside everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from services.gateway.core.effects import ProbeEngine
from services.gateway.core.open_request import NoAnswer
from shared.bus import BusError, NoResponders
from shared.messages.scheduler import ProbeReply

PROBE_TIMEOUT = 1.0
"""Seconds that an engine may take to answer a probe."""


class EngineProber:
    """Sends probes to engines, so that the actor's inbox does not wait for the replies.

    Each open request has one probe at most, which bounds the queue.
    """

    def __init__(
        self,
        ask: Callable[[ProbeEngine], Awaitable[ProbeReply]],
        on_reply: Callable[[ProbeEngine, ProbeReply | NoAnswer], Awaitable[None]],
    ) -> None:
        """`ask` raises BusError where there is no reply in `PROBE_TIMEOUT`."""
        self._ask, self._on_reply = ask, on_reply
        self._queue: asyncio.Queue[ProbeEngine] = asyncio.Queue()

    def probe(self, probe: ProbeEngine) -> None:
        """Queues a probe; its reply, or that there is none, goes to `on_reply`."""
        self._queue.put_nowait(probe)

    async def run(self) -> None:
        """Sends probes until it is cancelled. Raises what `on_reply` raises, which is a bug."""
        async with asyncio.TaskGroup() as probes:
            while True:
                probes.create_task(self._send(await self._queue.get()))

    async def _send(self, probe: ProbeEngine) -> None:
        reply: ProbeReply | NoAnswer
        try:
            reply = await self._ask(probe)
        except NoResponders:
            reply = "nobody there"
        except BusError:
            reply = "no answer in time"
        await self._on_reply(probe, reply)
