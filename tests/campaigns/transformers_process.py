"""Asks transformers, in a process of its own (`tests.campaigns.transformers_peer`), as a load asks a server."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec

from deploy.errors import CommandError
from services.bench.client.api import BenchRequest
from services.bench.statistics import RequestOutcome
from shared.config import process_environment
from tests.campaigns.transformers_peer.wire import (
    PeerAnswer,
    PeerMessage,
    PeerReady,
    PeerRefused,
    PeerRequest,
    PeerSettings,
)

MODULE = "tests.campaigns.transformers_peer"
START_SECONDS = 600.0
_STOP_SECONDS = 10.0
_LINE_LIMIT = 64 * 2**20


@dataclass
class Peer:
    """Owns the requests that wait for an answer."""

    ready: PeerReady
    _process: asyncio.subprocess.Process
    _timeout: float
    _open: dict[int, asyncio.Future[PeerAnswer]] = field(default_factory=dict)
    _number: int = 0
    _over: str | None = None

    async def ask(self, prompt: BenchRequest) -> RequestOutcome:
        """As `Api.stream`: a failure is in the outcome."""
        start = time.perf_counter()
        try:
            answer = await asyncio.wait_for(self.answer(prompt), self._timeout)
        except TimeoutError:
            answer = PeerAnswer(0, [], [], f"no answer within {self._timeout:g} s")
        if answer.error is not None or not answer.times:
            return RequestOutcome(start, time.perf_counter(), 0, 0, [], answer.error or "an answer without any token")
        times = answer.times
        return RequestOutcome(start, times[-1], prompt.tokens or 0, len(answer.tokens), times)

    async def answer(self, prompt: BenchRequest) -> PeerAnswer:
        assert isinstance(prompt.body, list), "its prompts are token ids"
        self._number += 1
        number = self._number
        if self._over is not None:
            return PeerAnswer(number, [], [], self._over)
        answer: asyncio.Future[PeerAnswer] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(msgspec.json.encode(PeerRequest(number, prompt.body, prompt.output_tokens)) + b"\n")
        return await answer

    async def read(self) -> None:
        """Until the process ends, after which every answer is a failure."""
        assert self._process.stdout is not None, "it is a pipe"
        async for line in self._process.stdout:
            told = msgspec.json.decode(line, type=PeerMessage)
            if isinstance(told, PeerRefused):
                self._fail(told.reason)
            elif isinstance(told, PeerAnswer):
                self._settle(told)
        self._fail("transformers' process ended")

    def _settle(self, told: PeerAnswer) -> None:
        answer = self._open.pop(told.number, None)
        if answer is not None and not answer.done():
            answer.set_result(told)

    def _fail(self, reason: str) -> None:
        self._over = self._over or reason
        for number in list(self._open):
            self._settle(PeerAnswer(number, [], [], self._over))


@contextlib.asynccontextmanager
async def peer(asked: PeerSettings, timeout: float) -> AsyncIterator[Peer]:
    """transformers, ready; gone with the context. Raises CommandError where it cannot."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        MODULE,
        msgspec.json.encode(asked).decode(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=process_environment(),
        limit=_LINE_LIMIT,
    )
    try:
        made = Peer(await _ready(process), process, timeout)
        reading = asyncio.create_task(made.read())
        try:
            yield made
        finally:
            reading.cancel()
    finally:
        await _end(process)


async def _ready(process: asyncio.subprocess.Process) -> PeerReady:
    assert process.stdout is not None, "it is a pipe"
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
    except TimeoutError:
        raise CommandError(f"transformers is not ready within {START_SECONDS:.0f} s") from None
    told = (
        msgspec.json.decode(line, type=PeerMessage) if line else PeerRefused("transformers' process ended at its start")
    )
    match told:
        case PeerReady():
            return told
        case PeerRefused():
            raise CommandError(told.reason)
        case _:
            raise AssertionError(f"{told} before anything was asked")


async def _end(process: asyncio.subprocess.Process) -> None:
    """It ends by itself when its standard input is closed."""
    assert process.stdin is not None, "it is a pipe"
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
