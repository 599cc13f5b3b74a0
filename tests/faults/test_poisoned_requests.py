"""A request that kills whatever computes it: it ends after two deaths, and nobody beside it notices."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI, InternalServerError

from tests.support.cluster.conversations import DEADLINE, QUESTIONS, Streamed, blocks_in_use, client_of, stream_chat
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.kv.prompts import until_all_ready
from tests.support.paths import REPOSITORY

TOKENS = 150
GOOD = QUESTIONS[:7]
POISON = [101, 57, 203, 57, 99]
"""Token ids that no other prompt holds in this order."""
TEXT = "skull and crossbones"
HOOK = REPOSITORY / "tests/support/cluster/poison"


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A line for each process that died of poison."""
    path = tmp_path_factory.mktemp("poison") / "deaths"
    path.touch()
    return path


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, deaths: Path) -> Iterator[RunningStack]:
    environment = {
        "POISON_TOKENS": " ".join(map(str, POISON)),
        "POISON_TEXT": TEXT,
        "POISON_DEATHS": str(deaths),
        "PYTHONPATH": os.pathsep.join((str(HOOK), str(REPOSITORY))),
    }
    folder = tmp_path_factory.mktemp("poisoned")
    with running_stack(folder, engines=2, tokenizers=2, kvstore="0", environment=environment) as stack:
        yield stack


async def streams(client: AsyncOpenAI, stack: RunningStack, started: asyncio.Event | None = None) -> list[Streamed]:
    options = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
    chats = (stream_chat(client, stack.model, question, started, **options) for question in GOOD)
    return await asyncio.gather(*chats)


async def refusal(client: AsyncOpenAI, stack: RunningStack, prompt: str | list[int]) -> str:
    with pytest.raises(InternalServerError) as caught:
        await client.completions.create(model=stack.model, prompt=prompt, max_tokens=20, temperature=0)
    assert caught.value.status_code == 500
    return str(caught.value)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("prompt", "service"), [([5, *POISON, 7], "rank"), (f"under {TEXT}", "tokenizer")], ids=["rank", "tokenizer"]
)
@pytest.mark.features("re-dispatch")
async def test_a_poisoned_request_ends_after_two_deaths(
    stack: RunningStack, deaths: Path, prompt: str | list[int], service: str
) -> None:
    before = (await asyncio.to_thread(deaths.read_text)).count(service)
    async with client_of(stack.url) as client, asyncio.timeout(3 * DEADLINE):
        undisturbed = await streams(client, stack)
        started = asyncio.Event()
        disturbed = asyncio.create_task(streams(client, stack, started))
        await started.wait()
        assert "it is not tried again" in await refusal(client, stack, prompt)
        seen = await disturbed
        assert [s.text for s in seen] == [s.text for s in undisturbed], stack.last_words()
        assert [(s.finishes, s.completion_tokens) for s in seen] == [(["length"], TOKENS)] * len(GOOD)
        assert (await asyncio.to_thread(deaths.read_text)).count(service) - before <= 2
        again = asyncio.create_task(refusal(client, stack, prompt))
        assert "it is not tried again" in await again
        assert (await asyncio.to_thread(deaths.read_text)).count(service) - before == 2
        await until_all_ready(stack)
        assert await blocks_in_use(stack) == 0
