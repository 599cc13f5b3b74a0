"""Sequences that lose their memory to others go on with blocks from the KV store, and say what they would have said."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx2

from tests.support.cluster.conversations import client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.kv.prompts import PATIENT, prompts

LENGTH, OUTPUT, REQUESTS = 150, 120, 6
SEEDED = {"temperature": 0.9, "seed": 1234, "top_p": 0.95}
LITTLE = ("--max-model-len=512", "--kv-memory=3MiB", "--max-num-seqs=8", "--max-batch-tokens=512")


async def answers(stack: RunningStack, *, at_once: bool) -> list[str]:
    """Of as many greedy requests as seeded ones, with their ends."""
    asked = prompts(stack, [LENGTH] * REQUESTS)
    limit = asyncio.Semaphore(REQUESTS if at_once else 1)

    async def one(number: int) -> str:
        sampling: dict[str, Any] = {"temperature": 0} if number % 2 else SEEDED
        async with limit:
            answer = await client.completions.create(
                model=stack.model,
                prompt=asked[number],
                max_tokens=OUTPUT,
                extra_body={"ignore_eos": True},
                **sampling,
            )
        return str(answer.choices[0].text)

    async with client_of(stack.url) as client:
        return await asyncio.gather(*(one(number) for number in range(REQUESTS)))


async def counted(stack: RunningStack, name: str) -> float:
    port = (await stack.heard())["engine-1"].metrics_port
    async with httpx2.AsyncClient() as http:
        text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(rf"baton_scheduler_{name} ", line))


async def test_greedy_and_seeded_streams_that_are_swapped_out_say_the_same(tmp_path: Path) -> None:
    with running_stack(tmp_path / "alone", kvstore="0") as stack:
        alone = await answers(stack, at_once=False)
    settings = (PATIENT, "worker.threads=1")
    with running_stack(tmp_path / "crowded", kvstore="64MiB", settings=settings, more=LITTLE) as stack:
        assert await answers(stack, at_once=True) == alone
        assert await counted(stack, "preemptions_total") > 0
        assert await counted(stack, r'resumed_total\{how="loaded"\}') > 0
