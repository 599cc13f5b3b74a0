"""Greedy streams over a stack that shares KV blocks, all started at once, and whether anything is held afterwards."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from openai import APIError, AsyncOpenAI

from tests.support.cluster.conversations import DEADLINE
from tests.support.cluster.stack import RunningStack

TOKENS = 120
"""`ignore_eos` keeps every stream open long enough to be cut in the middle."""
BLAMED = "alone at last; it is not tried again"
"""How a stream ends during which two processes died that handled it, the second one alone (ADR 22)."""


@dataclass
class Seen:
    """One streamed completion as its client saw it."""

    text: str = ""
    finishes: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    blamed: bool = False
    """Whether it was ended for the deaths of those that handled it."""


class Streams:
    """Owns the streams of one run. Another `salt` shares no blocks, and has the same text."""

    def __init__(self, client: AsyncOpenAI, model: str, prompts: list[list[int]], salt: str) -> None:
        self.seen = [Seen() for _ in prompts]
        self.tasks = [
            asyncio.create_task(_stream(client, model, prompt, salt, seen))
            for prompt, seen in zip(prompts, self.seen, strict=True)
        ]

    @property
    def ended(self) -> bool:
        return all(task.done() for task in self.tasks)

    async def until_one_begins(self) -> None:
        async with asyncio.timeout(DEADLINE):
            while not any(seen.text for seen in self.seen):
                await asyncio.sleep(0.001)

    async def leave(self) -> list[Seen]:
        """Every second client disconnects; what the others see to the end."""
        leaving, staying = self.tasks[::2], self.tasks[1::2]
        assert not all(task.done() for task in leaving), "all was over before anybody left"
        for task in leaving:
            task.cancel()
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(*leaving, return_exceptions=True)
            await asyncio.gather(*staying)
        return self.seen[1::2]

    async def end(self) -> list[Seen]:
        """Waits as long as they go on: engines of several ranks that die twice take a busy machine longer to start than
        any stream should stand still. Raises TimeoutError once none of them got anything for DEADLINE."""
        pending = set(self.tasks)
        while pending:
            before = self._got
            _, pending = await asyncio.wait(pending, timeout=DEADLINE, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.done() and task.exception() is not None for task in self.tasks):
                break
            if pending and self._got == before:
                raise TimeoutError(f"{len(pending)} streams got nothing for {DEADLINE:g} s")
        await asyncio.gather(*self.tasks)
        return self.seen

    @property
    def _got(self) -> int:
        """Characters of all streams, and how many have ended: it changes as long as any goes on."""
        return sum(len(seen.text) for seen in self.seen) + sum(task.done() for task in self.tasks)


async def _stream(client: AsyncOpenAI, model: str, prompt: list[int], salt: str, seen: Seen) -> None:
    try:
        await _read(client, model, prompt, salt, seen)
    except APIError as error:
        if BLAMED not in error.message:
            raise
        seen.blamed = True


async def _read(client: AsyncOpenAI, model: str, prompt: list[int], salt: str, seen: Seen) -> None:
    answer = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "cache_salt": salt},
    )
    async with answer:  # a cancelled task disconnects here
        async for chunk in answer:
            for choice in chunk.choices:
                seen.text += choice.text
                if choice.finish_reason:
                    seen.finishes.append(choice.finish_reason)
            if chunk.usage:
                seen.prompt_tokens, seen.completion_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens


async def assert_at_rest(stack: RunningStack) -> None:
    """Soon every process is ready, and none holds anything: no requests, no blocks, no pins, no reservations."""
    assert_nobody_failed(stack)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DEADLINE
    while (found := await _unrest(stack)) and loop.time() < deadline:
        await asyncio.sleep(0.05)
    assert not found, f"{found}\n{stack.last_words()}"


def assert_nobody_failed(stack: RunningStack) -> None:
    """Killed processes log nothing. A bug ends its process, too; its work is then repeated, invisibly to clients."""
    failed = [m.instance for m in stack.state.members if "Traceback (most recent call last)" in stack.log(m.instance)]
    assert not failed, f"{failed}\n{stack.last_words()}"


async def _unrest(stack: RunningStack) -> dict[str, int]:
    """Who is not ready, and what is held."""
    said = await stack.ps()
    found = {m.instance: 1 for m in stack.state.members if m.instance not in said or said[m.instance].phase != "ready"}
    for life in said.values():
        held = {f"{life.instance} requests": life.load}
        if life.engine is not None:
            held[f"{life.instance} blocks"] = life.engine.blocks_total - life.engine.blocks_free
        if life.store is not None:
            held |= {"pinned": life.store.pinned, "reserved": life.store.reserved}
        found |= {what: count for what, count in held.items() if count}
    return found
