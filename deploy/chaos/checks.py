"""Whether a stack is whole and at rest: everybody ready, nothing held, no more memory than before."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping

from deploy.chaos.stack import ChaosStack
from deploy.supervisor.operator_bus import operator_bus
from deploy.supervisor.state_file import StackState
from shared import topics
from shared.messages.lifecycle import KEEP_ALIVE_SECONDS, Lifecycle

FRESH = 1.5 * KEEP_ALIVE_SECONDS
"""Seconds after which a lifecycle message says nothing of now."""
POLL = 0.05


class StackWatch:
    """Owns the newest lifecycle message of each instance. It hears nothing while the bus is away, and goes on then."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[Lifecycle, float]] = {}

    async def record(self, life: Lifecycle) -> None:
        """Keeps a message as the newest of its instance."""
        self._heard[life.instance] = (life, time.monotonic())

    def latest(self) -> dict[str, Lifecycle]:
        """What each instance said within the last FRESH seconds."""
        since = time.monotonic() - FRESH
        return {name: life for name, (life, at) in self._heard.items() if at >= since}

    def unready(self, state: StackState) -> list[str]:
        """Processes that are to be there, and did not just say that they are ready."""
        heard = self.latest()
        found = [name for name, identity in state.processes.items() if not identity.lives]
        for member in state.members:
            life = heard.get(member.instance)
            if member.wanted and (life is None or life.pid != member.pid or life.phase != "ready"):
                found.append(member.instance)
        return sorted(set(found))

    async def until_ready(self, stack: ChaosStack, seconds: float) -> list[str]:
        """Who is not ready after that time; returns at once, with nobody, when all are."""
        end = time.monotonic() + seconds
        while (missing := self.unready(stack.state)) and time.monotonic() < end:
            await asyncio.sleep(POLL)
        return missing

    async def until_at_rest(self, seconds: float) -> dict[str, int]:
        """What is still held after that time, as `held`; returns at once, with nothing, when nothing is."""
        begun = time.monotonic()
        while time.monotonic() < begun + seconds:
            await asyncio.sleep(POLL)
            spoke = [at for _, at in self._heard.values()]
            # What was said before the last stream ended does not count.
            fresh = all(at > begun for at in spoke if at >= begun - FRESH)
            if fresh and not held(self.latest()):
                return {}
        return held(self.latest())


@contextlib.asynccontextmanager
async def stack_watch(state: StackState) -> AsyncIterator[StackWatch]:
    """Listens on the stack's bus while the context lasts. Raises CommandError where it cannot be reached."""
    watch = StackWatch()
    async with operator_bus(state) as bus:
        await bus.subscribe(topics.lifecycles(), watch.record)
        yield watch


def held(heard: Mapping[str, Lifecycle]) -> dict[str, int]:
    """What is in use, by what it is and whose; empty in a stack at rest."""
    found: dict[str, int] = {}
    for name, life in heard.items():
        found[f"{name}: requests"] = life.load
        if life.engine is not None:
            found[f"{name}: blocks"] = life.engine.blocks_total - life.engine.blocks_free
        if life.store is not None:
            found |= {f"{name}: pins": life.store.pinned, f"{name}: reserved slots": life.store.reserved}
    return {what: count for what, count in found.items() if count}
