"""Keeps a number of sequences decoding on one engine, and looks at where its steps' time goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from deploy.bench.asking import generate, listen, request_of
from deploy.cli.errors import CommandError
from shared import topics
from shared.bus import Bus
from shared.ids import Attempt, EngineId, RequestId
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import GatewayMessage
from shared.messages.generation import StopParams
from shared.messages.lifecycle import ModelCard
from shared.messages.scheduler import Cancel, Generate, StepFinished, StepTiming, WorkerResult

PROMPT = 24
"""Tokens; short, so that nearly every step decodes only."""
SETTLE_SECONDS = 60.0
"""Within which all sequences must be decoding, and later gone."""


class Step(NamedTuple):
    at: float
    """When its result was heard."""
    sequences: int
    tokens: int
    timing: StepTiming


class IdleFigures(NamedTuple):
    """Shares of the time from the first step's result to the last one's."""

    steps: int
    step_seconds: float
    tokens_per_second: float
    idle: float
    """Nothing was prepared, computed or sampled."""
    waiting: float
    """No plan was there: a part of `idle`."""
    prepare: float
    answer_seconds: float
    """From the end of a step until its result was on its way; mean."""


def idle_figures(steps: list[Step]) -> IdleFigures:
    """Of steps that follow each other. Raises ValueError for fewer than two."""
    if len(steps) < 2:
        raise ValueError("two steps at least have time between them")
    wall = steps[-1].at - steps[0].at
    timings = [step.timing for step in steps[1:]]
    prepare = sum(timing.prepare for timing in timings)
    busy = prepare + sum(timing.forward + timing.sample for timing in timings)
    return IdleFigures(
        steps=len(timings),
        step_seconds=wall / len(timings),
        tokens_per_second=sum(step.tokens for step in steps[1:]) / wall,
        idle=max(0.0, 1 - busy / wall),
        waiting=sum(timing.wait for timing in timings) / wall,
        prepare=prepare / wall,
        answer_seconds=sum(timing.answer for timing in timings) / len(timings),
    )


@dataclass
class SteadyLoad:
    """Owns the requests in hand: whichever ends is followed by another, so that always as many decode."""

    bus: Bus
    engine: EngineId
    card: ModelCard
    luck: Random = field(default_factory=lambda: Random(7))
    steps: list[Step] = field(default_factory=list)
    _open: set[RequestId] = field(default_factory=set)
    _number: int = 0
    _refused: str | None = None
    _ending: bool = False

    async def listen(self) -> None:
        await listen(self.bus, self.engine, self._tokens, self._gateway, self._result)

    async def measure(self, sequences: int, seconds: float) -> IdleFigures:
        """Raises CommandError where the engine does not take so many."""
        self._ending = False
        for _ in range(sequences):
            await self._send()
        await self._until(lambda: self._all_decode(sequences), f"{sequences} sequences do not decode together")
        self.steps.clear()
        await asyncio.sleep(seconds)
        figures = idle_figures([step for step in self.steps if step.sequences])
        await self._end()
        return figures

    def _all_decode(self, sequences: int) -> bool:
        return len(self.steps) > 20 and all(step.sequences == sequences for step in self.steps[-20:])

    async def _end(self) -> None:
        self._ending = True
        for request in list(self._open):
            await self.bus.publish(topics.engine_control(self.engine), Cancel(request, Attempt(1)))
        self._open.clear()
        quiet = time.monotonic()
        while time.monotonic() - quiet < 0.3:
            if self.steps and time.perf_counter() - self.steps[-1].at < 0.3:
                quiet = time.monotonic()
            await asyncio.sleep(0.05)
        self.steps.clear()

    async def _send(self) -> None:
        self._number += 1
        self._open.add(request_of(self._number))
        await self.bus.publish(topics.engine_requests(self.engine), self._generate())

    def _generate(self) -> Generate:
        """As long as the context allows, and of lengths that differ, so that not all end at once."""
        prompt = [self.luck.randrange(self.card.vocab_size) for _ in range(PROMPT)]
        longest = self.card.max_model_len - PROMPT
        stopping = StopParams(max_tokens=self.luck.randint(longest // 2, longest), ignore_eos=True)
        return generate(self._number, self.card.name, prompt, temperature=0.0, stopping=stopping)

    async def _tokens(self, batch: TokenBatch) -> None:
        for entry in batch.entries:
            if entry.finish is not None and entry.request in self._open:
                self._open.discard(entry.request)
                if not self._ending:
                    await self._send()

    async def _gateway(self, message: GatewayMessage) -> None:
        self._refused = str(message)

    async def _result(self, result: WorkerResult) -> None:
        if isinstance(result, StepFinished):
            tokens = sum(len(sampled.tokens) for sampled in result.sampled)
            self.steps.append(Step(time.perf_counter(), len(result.sampled), tokens, result.timing))

    async def _until(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while not condition():
            if self._refused is not None:
                raise CommandError(f"the engine refuses: {self._refused}")
            if time.monotonic() > deadline:
                raise CommandError(f"{otherwise} within {SETTLE_SECONDS:.0f} s")
            await asyncio.sleep(0.02)
