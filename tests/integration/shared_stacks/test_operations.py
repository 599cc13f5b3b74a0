"""What operators do over HTTP on the whole stack: caches are reset, answers end early, all is told of the server."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx2
import psutil
import pytest
from openai import AsyncOpenAI

from tests.support.cluster.conversations import DEADLINE
from tests.support.cluster.stack import RunningStack

PROMPT = "The capital of France is Paris, and the capital of Italy is Rome. " * 6


@pytest.fixture(scope="module")
def stack(ring: RunningStack) -> RunningStack:
    return ring


async def cached(client: AsyncOpenAI, stack: RunningStack) -> int:
    answer = await client.completions.create(model=stack.model, prompt=PROMPT, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


async def test_what_was_computed_before_a_reset_is_not_found(stack: RunningStack, client: AsyncOpenAI) -> None:
    await cached(client, stack)
    assert await cached(client, stack) > 0
    async with httpx2.AsyncClient(base_url=stack.url, timeout=30) as http:
        forgotten = (await http.post("/reset_prefix_cache")).raise_for_status().json()["instances"]
        assert forgotten["engine-1"] > 0 < forgotten["kvstore-1"]
        assert await cached(client, stack) == 0
        assert await cached(client, stack) > 0
        info = (await http.get("/server_info")).raise_for_status().json()
        assert info["engines"]["engine-1"]["model"]["name"] == stack.model


async def test_a_pause_loses_nothing(stack: RunningStack, client: AsyncOpenAI) -> None:
    asked: Any = {"model": stack.model, "prompt": PROMPT, "max_tokens": 300, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True}
    before = (await client.completions.create(**asked)).choices[0].text
    stream = await client.completions.create(**asked, stream=True)
    text = (await anext(stream)).choices[0].text
    async with httpx2.AsyncClient(base_url=stack.url, timeout=60) as http:
        (await http.post("/pause?mode=keep")).raise_for_status()
        assert (await http.get("/is_paused")).json()["is_paused"] is True
        newcomer = asyncio.create_task(client.completions.create(**asked))
        await until_still(http)
        assert not newcomer.done()
        (await http.post("/resume")).raise_for_status()
        assert (await http.get("/is_paused")).json()["is_paused"] is False
    assert text + "".join([chunk.choices[0].text async for chunk in stream]) == before
    assert (await newcomer).choices[0].text == before


async def until_still(http: httpx2.AsyncClient) -> None:
    """Until the engine says that it is paused, and has computed nothing for longer than requests may be silent without
    being asked after."""
    steps, since = None, time.monotonic()
    async with asyncio.timeout(DEADLINE):
        while time.monotonic() - since < 2.5:
            await asyncio.sleep(0.1)
            said = (await http.get("/server_info")).json()["engines"]["engine-1"]
            if said["steps"] != steps or said["paused"] != "all":  # its report may be of the time before
                steps, since = said["steps"], time.monotonic()


async def test_an_engine_that_slept_says_what_it_said_before(stack: RunningStack, client: AsyncOpenAI) -> None:
    """Beside adapters that came at the start, a KV store, and two gateways."""
    asked: Any = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}
    models = (stack.model, "pirate")
    before = [(await client.completions.create(model=model, **asked)).choices[0].text for model in models]
    frozen = asyncio.create_task(client.completions.create(model=stack.model, **{**asked, "max_tokens": 600}))
    rank = psutil.Process(stack.pid("engine-1-rank0"))
    memory = rank.memory_info().rss
    async with httpx2.AsyncClient(base_url=stack.url, timeout=120) as http:
        (await http.post("/sleep?mode=keep")).raise_for_status()
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True, "instances": {"engine-1": True}}
        assert rank.memory_info().rss < memory / 2
        assert [card.id for card in (await client.models.list()).data].count(stack.model) == 1
        assert not frozen.done()
        (await http.post("/wake_up")).raise_for_status()
        assert (await http.get("/is_sleeping")).json()["is_sleeping"] is False
        assert (await http.get("/is_paused")).json()["is_paused"] is False
    after = [(await client.completions.create(model=model, **asked)).choices[0].text for model in models]
    assert after == before
    assert (await frozen).choices[0].text.startswith(before[0])


async def test_streams_at_any_gateway_are_aborted(stack: RunningStack, client: AsyncOpenAI) -> None:
    asked: Any = {"model": stack.model, "prompt": "Once", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    streams = [await client.completions.create(**asked, stream=True) for _ in range(4)]
    ids = {(await anext(stream)).id for stream in streams}
    async with httpx2.AsyncClient(base_url=stack.url, timeout=30) as http:
        aborted = (await http.post("/abort_requests", json={"request_ids": sorted(ids)})).json()["request_ids"]
    assert set(aborted) == ids
    for stream in streams:
        assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "abort"
