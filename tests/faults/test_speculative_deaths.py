"""Engines that draft are killed in the middle of streams; greedy and seeded text is what it is without drafts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.conversations import DEADLINE, QUESTIONS, Streamed, client_of, stream_chat
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.kv.prompts import until_all_ready
from tests.support.paths import DEMO

STREAMS, TOKENS, TRIES = 8, 160, 5
SEEDED = {"temperature": 1.0, "seed": 4321, "presence_penalty": 0.2}
DRAFTING = f'--speculative={{"method": "draft", "model": "{DEMO / "draft"}"}}'


async def streams(stack: RunningStack, started: asyncio.Event | None = None) -> list[Streamed]:
    """Every second one is seeded."""
    async with client_of(stack.url) as client, asyncio.timeout(DEADLINE):
        return await asyncio.gather(
            *(
                stream_chat(client, stack.model, QUESTIONS[number % len(QUESTIONS)], started, **options(number))
                for number in range(STREAMS)
            )
        )


def options(number: int) -> dict[str, Any]:
    sampling: dict[str, Any] = SEEDED if number % 2 else {"temperature": 0.0}
    return {**sampling, "max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}


async def killed(stack: RunningStack, victim: str) -> list[Streamed]:
    """The streams of a stack whose `victim` dies while they are open."""
    for _ in range(TRIES):
        started = asyncio.Event()
        seen = asyncio.create_task(streams(stack, started))
        async with asyncio.timeout(DEADLINE):
            await started.wait()
        await asyncio.sleep(0.05)
        if not seen.done():
            stack.kill(victim)
            return await seen
        await seen
    raise AssertionError(f"{TRIES} times the streams ended before anything happened to them")


@pytest.mark.features("speculative", "re-dispatch")
async def test_drafted_streams_survive_kills_with_the_text_of_no_drafts(tmp_path: Path) -> None:
    with running_stack(tmp_path / "plain") as stack:
        expected = [one.text for one in await streams(stack)]
    with running_stack(tmp_path / "drafting", settings=("scheduler.speculation=fixed",), more=[DRAFTING]) as stack:
        assert [one.text for one in await streams(stack)] == expected
        for victim in ("engine-1-rank0", "engine-1"):
            assert [one.text for one in await killed(stack, victim)] == expected, victim
            await until_all_ready(stack)
