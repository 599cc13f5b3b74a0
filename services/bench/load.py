"""Makes requests at their times, never more at once than asked for, and collects what became of them."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Awaitable, Callable, Sequence

from services.bench.api import Prompt
from services.bench.core.outcome import Outcome, Run

Send = Callable[[Prompt], Awaitable[Outcome]]
Session = Callable[[Send], Awaitable[list[Outcome]]]
"""One client's requests, one after the other: it is given what makes a request, and answers with all outcomes."""
SPARE_FILES = 256


class Load:
    """Owns the outcomes of one run and the count of open requests."""

    def __init__(self, send: Send, max_concurrency: int | None, done: Callable[[Outcome], None]) -> None:
        self._send = send
        self._slots: contextlib.AbstractAsyncContextManager[object] = (
            asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
        )
        self._done = done
        self._open = self._peak = 0

    async def run(self, prompts: Sequence[Prompt], starts: Sequence[float]) -> Run:
        """Starts each prompt at its time, in seconds from now; a busy slot delays it, as does the machine."""
        return await self.run_sessions([_single(prompt) for prompt in prompts], starts)

    async def run_sessions(self, sessions: Sequence[Session], starts: Sequence[float]) -> Run:
        """As `run`, for clients that make several requests each; every request waits for a slot of its own."""
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
        return Run(outcomes, duration, self._peak, time.process_time() - cpu)

    async def _of(self, session: Session) -> list[Outcome]:
        return await session(self._one)

    async def _one(self, prompt: Prompt) -> Outcome:
        async with self._slots:
            self._open += 1
            self._peak = max(self._peak, self._open)
            outcome = await self._send(prompt)
            self._open -= 1
        self._done(outcome)
        return outcome


def _single(prompt: Prompt) -> Session:
    async def ask(send: Send) -> list[Outcome]:
        return [await send(prompt)]

    return ask


def allow_open_files(count: int) -> None:
    """Each open request is an open file; systems allow 1,024 unless told otherwise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
