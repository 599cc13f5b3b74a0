"""Keeps a number of sequences decoding on one engine, and measures where its steps' time goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from services.bench.engine.requests import EngineClient
from services.bench.errors import BenchError
from shared import topics
from shared.ids import Attempt
from shared.messages.detokenizer import TokenBatch
from shared.messages.generation import StopConditions
from shared.messages.scheduler import Cancel, StepFinished, StepTiming, WorkerResult

PROMPT = 24
"""Tokens; short, so that nearly every step decodes only."""
SETTLE_TIMEOUT = 60.0
"""Seconds in which all sequences must be decoding, and later gone."""


class ObservedStep(NamedTuple):
    """One step of the engine, as its result on the bus reports it."""

    at: float
    """When its result was received."""
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


def idle_figures(steps: list[ObservedStep]) -> IdleFigures:
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
class SteadyLoad(EngineClient):
    """Replaces each request that ends, so that the same number always decodes; owns the steps that were observed."""

    random: Random = field(default_factory=lambda: Random(7))
    steps: list[ObservedStep] = field(default_factory=list)
    _ending: bool = False

    async def measure(self, sequences: int, seconds: float) -> IdleFigures:
        """Raises BenchError if the engine does not run so many."""
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
        """As long as the context allows, and of lengths that differ, so that not all end at once."""
        prompt = [self.random.randrange(self.card.vocab_size) for _ in range(PROMPT)]
        longest = self.card.max_model_len - PROMPT
        stopping = StopConditions(max_tokens=self.random.randint(longest // 2, longest), ignore_eos=True)
        await self._publish(prompt, 0.0, stopping)

    async def _on_tokens(self, batch: TokenBatch) -> None:
        for entry in batch.entries:
            if entry.finish is not None and entry.request in self._open:
                self._open.discard(entry.request)
                if not self._ending:
                    await self._send()

    async def _on_result(self, result: WorkerResult) -> None:
        if isinstance(result, StepFinished):
            tokens = sum(len(sampled.tokens) for sampled in result.sampled)
            self.steps.append(ObservedStep(time.perf_counter(), len(result.sampled), tokens, result.timing))

    async def _until(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + SETTLE_TIMEOUT
        while not condition():
            if self._refused is not None:
                raise BenchError(f"the engine refuses: {self._refused}")
            if time.monotonic() > deadline:
                raise BenchError(f"{otherwise} within {SETTLE_TIMEOUT:.0f} s")
            await asyncio.sleep(0.02)
