"""How a benchmark sends requests to one engine directly, in place of coordinator, detokenizer and gateway."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from services.bench.errors import BenchError
from shared import topics
from shared.blocks import hash_chain
from shared.bus import Bus
from shared.ids import Attempt, DetokenizerId, EngineId, GatewayId, RequestId
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import GatewayMessage, RequestFailed, RequestRejected
from shared.messages.generation import Generation, SamplingOptions, StopConditions
from shared.messages.model_card import ModelCard
from shared.messages.scheduler import GenerateRequest, StepFinished, WorkerResult
from shared.packing import pack

DETOKENIZER = DetokenizerId("bench-detokenizer")
GATEWAY = GatewayId("bench-gateway")


@dataclass
class EngineClient:
    """Owns the open requests of one engine. What is made of it says what happens with tokens and results."""

    bus: Bus
    engine: EngineId
    card: ModelCard
    _open: set[RequestId] = field(default_factory=set)
    _number: int = 0
    _refused: str | None = None

    async def listen(self) -> None:
        """Receives the engine's messages for its requests, and the results of its workers; call it once, first."""
        await self.bus.subscribe(topics.detokenizer_tokens(DETOKENIZER), self._on_tokens)
        await self.bus.subscribe(topics.gateway_inbox(GATEWAY), self._on_gateway)
        await self.bus.subscribe(topics.engine_results(self.engine), self._on_result)

    async def _publish(
        self, prompt: list[int], temperature: float, stopping: StopConditions, prompt_logprobs: int | None = None
    ) -> RequestId:
        """One more request, whose name it returns; its number is its seed, too."""
        self._number += 1
        request, tokens = RequestId(f"bench-{self._number}"), pack(prompt)
        self._open.add(request)
        generation = Generation(
            request=request,
            attempt=Attempt(1),
            gateway=GATEWAY,
            model=self.card.name,
            tokens=tokens,
            prompt_length=len(prompt),
            block_hashes=b"".join(hash_chain(tokens, None, self.card.block_size)),
            sampling=SamplingOptions(seed=self._number, temperature=temperature, prompt_logprobs=prompt_logprobs),
            stopping=stopping,
            arrival=time.time(),
        )
        await self.bus.publish(topics.engine_requests(self.engine), GenerateRequest(generation, DETOKENIZER))
        return request

    async def _on_tokens(self, batch: TokenBatch) -> None:
        raise NotImplementedError

    async def _on_gateway(self, message: GatewayMessage) -> None:
        if isinstance(message, RequestRejected | RequestFailed):
            self._refused = str(message)

    async def _on_result(self, result: WorkerResult) -> None:
        raise NotImplementedError


# Has one engine answer a list of prompts to their ends, so many at a time, and adds up what its steps yielded.


MAX_OUTPUT_TOKENS = 300
"""Most output tokens of a request."""
ROUND_TIMEOUT = 600.0


class RoundFigures(NamedTuple):
    """The tokens of the engine's steps during one round of requests."""

    tokens: int
    """Number of output tokens."""
    seconds: float
    decodes: int
    """Sequences and steps that yielded tokens."""
    drafted: int
    accepted: int

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of the whole round."""
        return self.tokens / self.seconds


@dataclass
class FiniteLoad(EngineClient):
    """Owns the prompts that wait, and what the steps of a round have yielded."""

    temperature: float = 0.0
    _waiting: deque[list[int]] = field(default_factory=deque)
    _tokens: int = 0
    _decodes: int = 0
    _drafted: int = 0
    _accepted: int = 0
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, prompts: list[list[int]], concurrency: int) -> RoundFigures:
        """Raises BenchError if the engine refuses one, or takes too long."""
        self._waiting.extend(prompts)
        self._tokens = self._decodes = self._drafted = self._accepted = 0
        self._over.clear()
        begun = time.perf_counter()
        for _ in range(concurrency):
            await self._send()
        try:
            async with asyncio.timeout(ROUND_TIMEOUT):
                await self._over.wait()
        except TimeoutError:
            raise BenchError(f"{len(self._open)} requests are not answered in {ROUND_TIMEOUT:.0f} s") from None
        if self._refused is not None:
            raise BenchError(f"the engine refuses: {self._refused}")
        seconds = time.perf_counter() - begun
        return RoundFigures(self._tokens, seconds, self._decodes, self._drafted, self._accepted)

    async def _send(self) -> None:
        if not self._waiting:
            if not self._open:
                self._over.set()
            return
        stopping = StopConditions(max_tokens=MAX_OUTPUT_TOKENS)
        await self._publish(self._waiting.popleft(), self.temperature, stopping)

    async def _on_tokens(self, batch: TokenBatch) -> None:
        for entry in batch.entries:
            if entry.request in self._open:
                self._tokens += len(entry.tokens)
                if entry.finish is not None:
                    self._open.discard(entry.request)
                    await self._send()

    async def _on_gateway(self, message: GatewayMessage) -> None:
        await super()._on_gateway(message)
        if self._refused is not None:
            self._over.set()

    async def _on_result(self, result: WorkerResult) -> None:
        if isinstance(result, StepFinished):
            self._decodes += sum(bool(sampled.tokens) for sampled in result.sampled)
            self._drafted += result.drafted
            self._accepted += sum(result.accepted)
