"""Waits on a real stack's bus for the message that shows how far its requests are, to interfere at that moment.

Whoever listens is gone again before anything is done: a subject on which a test listened would have a taker, however
dead the one that it is meant for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from shared import topics
from shared.bus import Bus
from shared.bus.nats_connection import NatsOptions, connect
from shared.ids import EngineId, NodeId
from shared.messages.kvstore import Commit, Find, Reserve
from shared.messages.scheduler import StepFinished
from shared.topics import Topic
from tests.support.cluster.stack import RunningStack

DEADLINE = 60.0


class Moment(NamedTuple):
    """The first message on a topic that shows what is waited for."""

    name: str
    user: str
    """A service that may hear the topic."""
    topic: Topic[Any]
    shows: Callable[[Any], bool]

    def __str__(self) -> str:
        return self.name


def prompts_are_computed(engine: str) -> Moment:
    topic = topics.engine_steps(EngineId(engine))
    return Moment(f"{engine} computes", "worker", topic, lambda plan: bool(plan.work))


def tokens_are_drawn(engine: str) -> Moment:
    """The first of the engine's tokens has just been drawn."""
    topic = topics.engine_results(EngineId(engine))
    return Moment(f"{engine} draws", "scheduler", topic, lambda r: isinstance(r, StepFinished) and bool(r.sampled))


def blocks_are_copied(engine: str) -> Moment:
    """The engine's ranks received a request to copy blocks from or to the store."""
    topic = topics.engine_steps(EngineId(engine))
    return Moment(f"{engine} copies", "worker", topic, lambda plan: bool(plan.transfers))


def requests_are_handed_to(engine: str) -> Moment:
    topic = topics.engine_requests(EngineId(engine))
    return Moment(f"{engine} takes over", "scheduler", topic, lambda generate: generate.handed is not None)


def store_is_asked(node: NodeId, question: type[Find | Reserve | Commit]) -> Moment:
    topic = topics.kvstore_requests(node)
    return Moment(f"store {question.__name__}", "kvstore", topic, lambda asked: isinstance(asked, question))


class Listener:
    """Hears one moment."""

    def __init__(self, bus: Bus, moment: Moment) -> None:
        self._bus = bus
        self._moment = moment
        self._came = asyncio.Event()

    async def begin(self) -> None:
        await self._bus.subscribe(self._moment.topic, self._heard)
        await self._bus.flush()

    async def moment(self) -> None:
        """Returns right after it, and listens no more. Raises TimeoutError where it does not come."""
        async with asyncio.timeout(DEADLINE):
            await self._came.wait()
        await self._bus.close()

    async def _heard(self, message: Any) -> None:
        if self._moment.shows(message):
            self._came.set()


@contextlib.asynccontextmanager
async def user_bus(stack: RunningStack, service: str) -> AsyncIterator[Bus]:
    """A connection that may do what `service` may."""
    state = stack.state
    user, password = stack.user_credentials(service)
    bus = await connect(NatsOptions(servers=state.nats_url, namespace=state.namespace, user=user, password=password))
    try:
        yield bus
    finally:
        await bus.close()


@contextlib.asynccontextmanager
async def listening(stack: RunningStack, moment: Moment) -> AsyncIterator[Listener]:
    """What brings the moment about belongs inside."""
    async with user_bus(stack, moment.user) as bus:
        listener = Listener(bus, moment)
        await listener.begin()
        yield listener
