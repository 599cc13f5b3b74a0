"""Sends requests at their times, up to a maximum concurrency, and collects their outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from random import Random

from services.bench.client.api import BenchRequest
from services.bench.statistics import BenchResult, RequestOutcome

Send = Callable[[BenchRequest], Awaitable[RequestOutcome]]
Session = Callable[[Send], Awaitable[list[RequestOutcome]]]
"""One client's requests, one after the other: it is given what makes a request, and answers with all outcomes."""
SPARE_FILES = 256


class LoadGenerator:
    """Owns the outcomes of one run and the count of open requests."""

    def __init__(self, send: Send, max_concurrency: int | None, done: Callable[[RequestOutcome], None]) -> None:
        self._send = send
        self._slots: contextlib.AbstractAsyncContextManager[object] = (
            asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
        )
        self._done = done
        self._open = self._peak = 0

    async def run(self, prompts: Sequence[BenchRequest], starts: Sequence[float]) -> BenchResult:
        """Starts each prompt at its time, in seconds from now; a busy slot delays it, as does the machine."""
        return await self.run_sessions([_single(prompt) for prompt in prompts], starts)

    async def run_sessions(self, sessions: Sequence[Session], starts: Sequence[float]) -> BenchResult:
        """See `run`, for clients that make several requests each; every request waits for a slot of its own."""
        allow_open_files(len(sessions) + SPARE_FILES)
        cpu, begin = time.process_time(), time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            started = []
            for session, start in zip(sessions, starts, strict=True):
                if (wait := begin + start - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                started.append(tasks.create_task(self._of(session)))
        duration = time.perf_counter() - begin
        outcomes = [outcome for task in started for outcome in task.result()]
        return BenchResult(outcomes, duration, self._peak, time.process_time() - cpu)

    async def _of(self, session: Session) -> list[RequestOutcome]:
        return await session(self._one)

    async def _one(self, prompt: BenchRequest) -> RequestOutcome:
        async with self._slots:
            self._open += 1
            self._peak = max(self._peak, self._open)
            outcome = await self._send(prompt)
            self._open -= 1
        self._done(outcome)
        return outcome


def _single(prompt: BenchRequest) -> Session:
    async def ask(send: Send) -> list[RequestOutcome]:
        return [await send(prompt)]

    return ask


def allow_open_files(count: int) -> None:
    """Each open request is an open file; systems allow 1,024 by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# When each request starts.


def arrivals(count: int, rate: float, burstiness: float, random: Random) -> list[float]:
    """`count` start times in seconds, ascending from 0. An infinite rate starts all at once.

    Gaps are gamma-distributed with mean 1 / `rate` and shape `burstiness`: 1 is a Poisson process, less is
    burstier, more is steadier.
    """
    if math.isinf(rate):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += random.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times
