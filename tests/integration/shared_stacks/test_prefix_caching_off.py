"""Prefix caching turned off, for one request or for a whole stack: nobody keeps blocks or looks for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from tests.support.cluster.conversations import DEADLINE, client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.kv.prompts import PATIENT, ask, handed_over, prompts, store_of, stored

OFF: dict[str, Any] = {"extra_body": {"ignore_eos": True, "enable_prefix_caching": False}}
BLOCKS = 12


@pytest.fixture(scope="module")
def uncached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(
        tmp_path_factory.mktemp("off"), kvstore="64MiB", settings=[PATIENT], more=["--no-enable-prefix-caching"]
    ) as stack:
        yield stack


async def metric(stack: RunningStack, instance: str, name: str) -> float:
    """Of one instance, all labels together."""
    port = (await stack.heard())[instance].metrics_port
    async with httpx2.AsyncClient(timeout=DEADLINE) as http:
        lines = (await http.get(f"http://127.0.0.1:{port}/metrics")).text.splitlines()
    values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    assert values, f"{instance} has no {name}"
    return sum(values)


async def asked_twice(client: AsyncOpenAI, stack: RunningStack, prompt: list[int], **options: Any) -> tuple[str, int]:
    """The text, which both answers share, and the tokens that the second found cached."""
    first, second = [await ask(client, stack.model, prompt, **options) for _ in range(2)]
    assert (second.text, first.cached) == (first.text, 0)
    return first.text, second.cached


async def test_a_request_without_caching_leaves_nothing_and_finds_nothing(pools: RunningStack) -> None:
    (prompt,) = prompts(pools, [200], salt=12)
    index_blocks = "baton_router_index_blocks"
    async with client_of(pools.url) as client:
        before, handed = (await store_of(pools)).committed, handed_over(pools)
        indexed = await metric(pools, "coordinator-1", index_blocks)
        text, found = await asked_twice(client, pools, prompt, **OFF)
        assert (found, handed_over(pools)) == (0, handed)
        assert await metric(pools, "coordinator-1", index_blocks) == indexed
        assert (await store_of(pools)).committed == before
        assert await asked_twice(client, pools, prompt) == (text, BLOCKS * 16)
        await stored(pools, before + BLOCKS)
        again = await ask(client, pools.model, prompt, **OFF)
    assert (again.text, again.cached) == (text, 0)
    assert await metric(pools, "coordinator-1", index_blocks) >= indexed + BLOCKS


async def test_choices_of_one_request_without_caching_share_nothing(pools: RunningStack) -> None:
    (prompt,) = prompts(pools, [200], salt=13)
    async with client_of(pools.url) as client:
        answers = await client.completions.create(
            model=pools.model, prompt=prompt, n=3, max_tokens=8, temperature=0, extra_body=OFF["extra_body"]
        )
        assert answers.usage is not None
        assert answers.usage.prompt_tokens_details is not None
        assert answers.usage.prompt_tokens_details.cached_tokens == 0
        assert len({choice.text for choice in answers.choices}) == 1


async def test_the_switch_is_a_boolean(pools: RunningStack) -> None:
    async with client_of(pools.url) as client:
        with pytest.raises(openai.BadRequestError, match="enable_prefix_caching"):
            await ask(client, pools.model, [5], extra_body={"enable_prefix_caching": "no"})


async def test_a_stack_without_caching_answers_alike_and_keeps_nothing(
    pools: RunningStack, uncached: RunningStack
) -> None:
    (prompt,) = prompts(uncached, [200], salt=14)
    async with client_of(pools.url) as client:
        expected = (await ask(client, pools.model, prompt)).text
    async with client_of(uncached.url) as client:
        assert await asked_twice(client, uncached, prompt) == (expected, 0)
        asking = {"extra_body": {"ignore_eos": True, "enable_prefix_caching": True}}
        assert await asked_twice(client, uncached, prompt, **asking) == (expected, 0)
    assert await metric(uncached, "coordinator-1", "baton_router_index_blocks") == 0
    report = await store_of(uncached)
    assert (report.committed, report.hits, report.misses) == (0, 0, 0)
