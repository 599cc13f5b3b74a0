"""What pages that look into an engine see of it: its blocks, steps and queue. An engine is asked once each interval for
all of its viewers, and only while it has some."""

from __future__ import annotations

import asyncio
from typing import Any

from services.gateway.console.viewer import ConsoleViewer, event_bytes
from shared import topics
from shared.bus import Bus, BusError
from shared.ids import EngineId
from shared.messages.scheduler import EnginePicture, ReadPicture
from shared.packing import to_plain

ANSWER_TIMEOUT = 2.0
"""Seconds. An engine answers between two messages; one that does not is busy or dead, which the page says."""
MAX_VIEWERS_OF_ENGINES = 32
"""Further ones are refused."""


class EngineViewers:
    """Owns those that look into one engine, and the last event that they were sent."""

    def __init__(self) -> None:
        self.viewers: set[ConsoleViewer] = set()
        self.event = b""
        self.asked_at = float("-inf")
        self.lock = asyncio.Lock()


class EngineFeed:
    """Owns the viewers of every engine. Without any, nothing is asked and nothing runs."""

    def __init__(self, bus: Bus, interval: float) -> None:
        """`interval`: seconds between two pictures of an engine."""
        self._bus, self.interval = bus, interval
        self._engines: dict[EngineId, EngineViewers] = {}
        self.asked = 0
        """How many pictures were asked for."""

    @property
    def full(self) -> bool:
        """Whether no further viewer is taken."""
        return sum(len(each.viewers) for each in self._engines.values()) >= MAX_VIEWERS_OF_ENGINES

    @property
    def watched(self) -> bool:
        """Whether somebody looks into an engine."""
        return bool(self._engines)

    async def follow(self, engine: EngineId, viewer: ConsoleViewer) -> None:
        """Writes `engine` events, or `trouble` where it does not answer, until the viewer is ended."""
        there = self._engines.setdefault(engine, EngineViewers())
        there.viewers.add(viewer)
        try:
            while not viewer.ended.done():
                viewer.write(await self._latest(engine, there))
                await asyncio.wait([viewer.ended], timeout=self.interval)
        finally:
            there.viewers.discard(viewer)
            if not there.viewers:
                self._engines.pop(engine, None)

    def stop(self) -> None:
        """Ends all viewers' streams."""
        for each in self._engines.values():
            for viewer in each.viewers:
                viewer.end(told=True)

    async def _latest(self, engine: EngineId, there: EngineViewers) -> bytes:
        """The last event, asked for anew where it is about as old as the interval."""
        loop = asyncio.get_running_loop()
        async with there.lock:
            if loop.time() - there.asked_at > 0.9 * self.interval:
                there.asked_at = loop.time()
                there.event = await self._ask(engine)
        return there.event

    async def _ask(self, engine: EngineId) -> bytes:
        self.asked += 1
        try:
            picture: EnginePicture = await self._bus.request(
                topics.engine_probes(engine), ReadPicture(), EnginePicture, ANSWER_TIMEOUT
            )
        except BusError as error:
            return event_bytes(b"trouble", {"engine": engine, "text": f"{engine} does not answer: {error}"})
        return event_bytes(b"engine", {"engine": engine, **_plain(picture)})


def _plain(picture: EnginePicture) -> dict[str, Any]:
    """As JSON; the map's cells are a digit each."""
    plain: dict[str, Any] = to_plain(picture)
    if picture.blocks is not None:
        plain["blocks"]["cells"] = "".join(map(str, picture.blocks.cells))
    return plain
