"""Every engine is drained: new requests get 503 soon, or wait as long as configured, and `/ready` says the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Completion

from tests.support.cluster.conversations import DEADLINE, client_of
from tests.support.cluster.stack import RunningStack, running_stack

SLOW = "--sim-step-ms=20"
SOON = 50.0
"""Seconds on a busy machine; without the bound it would be 60 at least."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(tmp_path_factory.mktemp("prompt"), device="sim", more=[SLOW], wait_for_engines=None) as stack:
        yield stack


async def ready(stack: RunningStack) -> tuple[int, int]:
    """The statuses of both pages. They may differ for a moment: they are asked one after the other, of any gateway."""
    async with httpx2.AsyncClient(timeout=DEADLINE) as http:
        answers = [await http.get(f"{stack.url}{page}") for page in ("/ready", "/health")]
    return answers[0].status_code, answers[1].status_code


async def until_ready_is(stack: RunningStack, status: int) -> None:
    async with asyncio.timeout(DEADLINE):
        while await ready(stack) != (status, status):
            await asyncio.sleep(0.05)


async def ask(client: AsyncOpenAI, stack: RunningStack, tokens: int = 4) -> Completion:
    return await client.with_options(max_retries=0).completions.create(
        model=stack.model, prompt="Hello", max_tokens=tokens, seed=1, extra_body={"ignore_eos": True}
    )


def assert_refused(error: openai.InternalServerError) -> None:
    assert (error.status_code, error.response.headers["retry-after"]) == (503, "1")
    assert "no scheduler is ready" in error.message


def baton(stack: RunningStack, *command: str) -> None:
    done = stack.baton(*command)
    assert done.returncode == 0, done.stderr


async def test_with_all_engines_drained_new_requests_are_refused_soon_and_ready_says_so(stack: RunningStack) -> None:
    async with client_of(stack.url) as client:
        expected = (await ask(client, stack, tokens=300)).choices[0].text
        running = asyncio.create_task(ask(client, stack, tokens=300))
        await stack.until_heard(lambda said: said["engine-1"].load > 0)
        await asyncio.to_thread(baton, stack, "drain", "engine-1", "--force")
        begun = time.monotonic()
        with pytest.raises(openai.InternalServerError) as refused:
            await ask(client, stack)
        assert_refused(refused.value)
        assert time.monotonic() - begun < SOON
        assert await ready(stack) == (503, 503)
        with pytest.raises(openai.InternalServerError) as refused:
            await ask(client, stack)
        assert_refused(refused.value)
        assert (await running).choices[0].text == expected, "what was accepted before is finished"
        await asyncio.to_thread(baton, stack, "undrain", "engine-1")
        await until_ready_is(stack, 200)
        assert (await ask(client, stack)).usage is not None


async def test_new_requests_are_refused_without_a_tokenizer_too(stack: RunningStack) -> None:
    async with client_of(stack.url) as client:
        await asyncio.to_thread(baton, stack, "drain", "tokenizer-1", "--force")
        await until_ready_is(stack, 503)
        with pytest.raises(openai.InternalServerError, match="no tokenizer is ready"):
            await ask(client, stack)
        await asyncio.to_thread(baton, stack, "undrain", "tokenizer-1")
        await until_ready_is(stack, 200)
        assert (await ask(client, stack)).usage is not None


async def test_new_requests_wait_for_as_long_as_configured(tmp_path: Path) -> None:
    with running_stack(tmp_path, device="sim", wait_for_engines=60) as stack:
        async with client_of(stack.url) as client:
            await asyncio.to_thread(baton, stack, "drain", "engine-1", "--force")
            await stack.until_heard(lambda said: said["engine-1"].phase == "draining")
            waiting = asyncio.create_task(ask(client, stack))
            await asyncio.sleep(4)
            assert (waiting.done(), await ready(stack)) == (False, (200, 200))
            await asyncio.to_thread(baton, stack, "undrain", "engine-1")
            assert (await waiting).usage is not None
