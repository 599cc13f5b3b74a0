"""The share of a load in which a running stack's devices had nothing to do, from the reports of its workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from deploy.supervisor.operator_bus import operator_bus
from deploy.supervisor.state_file import StackState
from shared import topics
from shared.messages.lifecycle import Lifecycle, StepSums

_HEARTBEAT = 0.6
"""Seconds within which every worker has reported."""


class IdleWatch:
    """Owns each worker's last report, and its report when the load began."""

    def __init__(self) -> None:
        self._now: dict[str, StepSums] = {}
        self._before: dict[str, StepSums] = {}

    async def take(self, life: Lifecycle) -> None:
        if life.worker is not None:
            self._now[life.instance] = life.worker.sums

    async def begin(self) -> None:
        await asyncio.sleep(_HEARTBEAT)
        self._before = dict(self._now)

    async def end(self) -> dict[str, float | None]:
        """The shares since `begin`: `idle` without a plan, `prepare` with one (on a GPU that idles meanwhile)."""
        await asyncio.sleep(_HEARTBEAT)
        sums = [(self._before.get(instance, StepSums()), now) for instance, now in self._now.items()]
        spent = {
            part: sum(getattr(now, part) - getattr(before, part) for before, now in sums)
            for part in ("wait", "prepare", "forward", "sample")
        }
        total = sum(spent.values())
        shares = {"idle": spent["wait"], "prepare": spent["prepare"]}
        return {name: seconds / total if total > 0 else None for name, seconds in shares.items()}


@contextlib.asynccontextmanager
async def idle_watch(state: StackState) -> AsyncIterator[IdleWatch]:
    """Raises CommandError where the stack's bus cannot be reached."""
    async with operator_bus(state) as bus:
        watch = IdleWatch()
        await bus.subscribe(topics.lifecycles(), watch.take)
        yield watch
