"""Prompts and questions for tests of stacks that share KV blocks, and how one sees that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from openai import AsyncOpenAI

from shared.messages.lifecycle import Lifecycle, StoreReport
from tests.support.cluster.conversations import DEADLINE
from tests.support.cluster.stack import RunningStack

TEXT = " ".join(f"On day {day} fox {day * 7 % 101} met hare {day * 3 % 89} by the old mill." for day in range(300))
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 64, 100, 333, 1500)
"""Prompts in tokens: around the edges of blocks and of chunks."""


PATIENT = "scheduler.store_deadline=5"
"""A setting where what is shared is tested, not how fast the store answers on this machine."""
CHUNKED_AND_HANDED_OVER = ("--disaggregate-tokens=0", "--max-batch-tokens=96", "--max-num-seqs=16")
"""Options of a stack with pools: long prompts are computed in chunks, and every request is handed over."""


class Answered(NamedTuple):
    text: str
    cached: int
    """Prompt tokens that were not computed."""


class Held(NamedTuple):
    """What is in use; all 0 in a stack at rest."""

    blocks: int
    """On the devices, by sequences."""
    pinned: int
    reserved: int


def prompts(stack: RunningStack, lengths: Iterable[int] = LENGTHS, salt: int = 0) -> list[list[int]]:
    """Token prompts that share no beginning with each other, nor with those of another salt."""
    body = json.dumps({"model": stack.model, "prompt": TEXT}).encode()
    request = urllib.request.Request(f"{stack.url}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
        tokens: list[int] = json.load(answer)["tokens"]
    return [tokens[start + 131 * salt :][:length] for start, length in enumerate(lengths)]


async def ask(client: AsyncOpenAI, model: str, prompt: list[int], **options: Any) -> Answered:
    """One greedy completion."""
    given: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}, **options}
    answer = await client.completions.create(model=model, prompt=prompt, **given)
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return Answered(answer.choices[0].text, (details.cached_tokens or 0) if details else 0)


async def ask_all(client: AsyncOpenAI, model: str, asked: list[list[int]]) -> list[str]:
    """At once; the texts."""
    async with asyncio.timeout(DEADLINE):
        return [answer.text for answer in await asyncio.gather(*(ask(client, model, each) for each in asked))]


async def store_of(stack: RunningStack) -> StoreReport:
    """What the store last said of itself. Raises AssertionError where it says nothing."""

    def store(said: Mapping[str, Lifecycle]) -> StoreReport | None:
        return next((life.store for life in said.values() if life.store is not None and life.phase == "ready"), None)

    found = store(await stack.until_heard(lambda said: store(said) is not None))
    assert found is not None
    return found


async def stored(stack: RunningStack, blocks: int) -> None:
    """Until the store shows so many blocks."""
    deadline = time.monotonic() + DEADLINE
    while (await store_of(stack)).committed < blocks:
        assert time.monotonic() < deadline, stack.last_words()


async def held(stack: RunningStack) -> Held:
    """Once nothing is held any more, or what is still held then."""
    deadline = time.monotonic() + DEADLINE
    while True:
        said = await stack.until_heard(lambda said: any(life.engine for life in said.values()))
        engines = [life.engine for life in said.values() if life.engine is not None]
        stores = [life.store for life in said.values() if life.store is not None]
        seen = Held(
            sum(engine.blocks_total - engine.blocks_free for engine in engines),
            sum(store.pinned for store in stores),
            sum(store.reserved for store in stores),
        )
        if not any(seen) or time.monotonic() > deadline:
            assert stores, "no store reports"
            return seen


async def until_all_ready(stack: RunningStack) -> None:
    await stack.until_heard(lambda said: all(said[m.instance].phase == "ready" for m in stack.state.members))


def handed_over(stack: RunningStack, to: str = "") -> int:
    """Requests that prefill engines have passed on, to one engine or to any."""
    lines = [line for name in stack.instances("scheduler") for line in stack.log(name).splitlines()]
    return sum('"event":"handed over"' in line and (not to or f'"engine":"{to}"' in line) for line in lines)


def retries(stack: RunningStack) -> int:
    """Attempts beyond the first, over all gateways."""
    return sum(retries_in(stack.log(name)) for name in stack.instances("gateway"))


def retries_in(log: str) -> int:
    """Attempts beyond the first, by a gateway's log: what hides a loss from clients, and must not be needed where
    nothing is lost. Without those of an instance that the machine gave no time to speak."""
    return sum('"event":"dispatched again"' in line and "silent for" not in line for line in log.splitlines())


def started_by(stack: RunningStack, engine: str) -> int:
    """Requests whose stream that engine has opened."""
    return stack.log(engine).count('"event":"started"')
