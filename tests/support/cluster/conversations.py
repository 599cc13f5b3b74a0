"""Requests that tests send to a real stack, and readers of what comes back. Used by integration and fault tests."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from openai import AsyncOpenAI

from tests.support.cluster.stack import RunningStack

QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Japan?",
    "Spell the word lantern.",
    "Count from 3 to 12.",
    "What is 7 plus 5?",
    "Tell me a short story about a fox.",
    "Tell me a story about a lighthouse.",
    "Who are you?",
)
DEADLINE = 90.0


@dataclass
class Streamed:
    """One streamed completion as the client saw it."""

    text: str = ""
    finish: str | None = None
    chunks: int = 0
    completion_tokens: int | None = None
    finishes: list[str] = field(default_factory=list)


def client_of(url: str) -> AsyncOpenAI:
    """The SDK without its own retries: what fails must be seen."""
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE)


async def stream_chat(
    client: AsyncOpenAI, model: str, question: str, started: asyncio.Event | None = None, **options: object
) -> Streamed:
    """Streams one chat to its end, greedy where `options` have no temperature. Sets `started` at the first text."""
    seen = Streamed()
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        stream=True,
        stream_options={"include_usage": True},
        **{"temperature": 0, **options},  # type: ignore[call-overload]
    )
    async for chunk in stream:
        seen.chunks += 1
        if chunk.usage:
            seen.completion_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            seen.text += choice.delta.content or ""
            if choice.delta.content and started is not None:
                started.set()
            if choice.finish_reason:
                seen.finishes.append(choice.finish_reason)
                seen.finish = choice.finish_reason
    return seen


async def blocks_in_use(stack: RunningStack) -> int:
    """KV blocks held by sequences, over all engines, once the last cancels have arrived, or what is held then."""
    deadline = time.monotonic() + DEADLINE
    while True:
        said = await stack.until_heard(lambda said: any(life.engine for life in said.values()))
        reports = [life.engine for life in said.values() if life.engine is not None]
        used = sum(report.blocks_total - report.blocks_free for report in reports)
        if used == 0 or time.monotonic() > deadline:
            return used
