"""Has one engine answer a list of prompts to their ends, so many at a time, and adds up what its steps yielded."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from deploy.bench.asking import generate, listen, request_of
from deploy.cli.errors import CommandError
from shared import topics
from shared.bus import Bus
from shared.ids import EngineId, RequestId
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import GatewayMessage
from shared.messages.generation import StopParams
from shared.messages.lifecycle import ModelCard
from shared.messages.scheduler import StepFinished, WorkerResult

LONGEST = 300
"""Output tokens."""
ROUND_SECONDS = 600.0


class RoundFigures(NamedTuple):
    tokens: int
    """Of the output."""
    seconds: float
    decodes: int
    """Sequences and steps that yielded tokens."""
    drafted: int
    accepted: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass
class AnsweringLoad:
    """Owns the requests in hand of one engine."""

    bus: Bus
    engine: EngineId
    card: ModelCard
    temperature: float
    _waiting: deque[list[int]] = field(default_factory=deque)
    _open: set[RequestId] = field(default_factory=set)
    _number: int = 0
    _tokens: int = 0
    _decodes: int = 0
    _drafted: int = 0
    _accepted: int = 0
    _over: asyncio.Event = field(default_factory=asyncio.Event)
    _refused: str | None = None

    async def listen(self) -> None:
        await listen(self.bus, self.engine, self._got, self._gateway, self._result)

    async def answer(self, prompts: list[list[int]], concurrency: int) -> RoundFigures:
        """Raises CommandError where the engine refuses one, or takes too long."""
        self._waiting.extend(prompts)
        self._tokens = self._decodes = self._drafted = self._accepted = 0
        self._over.clear()
        begun = time.perf_counter()
        for _ in range(concurrency):
            await self._send()
        try:
            await asyncio.wait_for(self._over.wait(), ROUND_SECONDS)
        except TimeoutError:
            raise CommandError(f"{len(self._open)} requests are not answered in {ROUND_SECONDS:.0f} s") from None
        if self._refused is not None:
            raise CommandError(f"the engine refuses: {self._refused}")
        seconds = time.perf_counter() - begun
        return RoundFigures(self._tokens, seconds, self._decodes, self._drafted, self._accepted)

    async def _send(self) -> None:
        if not self._waiting:
            if not self._open:
                self._over.set()
            return
        self._number += 1
        self._open.add(request_of(self._number))
        asked = generate(
            self._number,
            self.card.name,
            self._waiting.popleft(),
            temperature=self.temperature,
            stopping=StopParams(max_tokens=LONGEST),
        )
        await self.bus.publish(topics.engine_requests(self.engine), asked)

    async def _got(self, batch: TokenBatch) -> None:
        for entry in batch.entries:
            if entry.request in self._open:
                self._tokens += len(entry.tokens)
                if entry.finish is not None:
                    self._open.discard(entry.request)
                    await self._send()

    async def _gateway(self, message: GatewayMessage) -> None:
        if type(message).__name__ in ("Rejected", "Failed"):
            self._refused = str(message)
            self._over.set()

    async def _result(self, result: WorkerResult) -> None:
        if isinstance(result, StepFinished):
            self._decodes += sum(bool(sampled.tokens) for sampled in result.sampled)
            self._drafted += result.drafted
            self._accepted += sum(result.accepted)
