"""What operators do over HTTP on the whole stack: caches are reset, answers end early, all is told of the server."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

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


async def test_streams_at_any_gateway_are_aborted(stack: RunningStack, client: AsyncOpenAI) -> None:
    asked: Any = {"model": stack.model, "prompt": "Once", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    streams = [await client.completions.create(**asked, stream=True) for _ in range(4)]
    ids = {(await anext(stream)).id for stream in streams}
    async with httpx2.AsyncClient(base_url=stack.url, timeout=30) as http:
        aborted = (await http.post("/abort_requests", json={"request_ids": sorted(ids)})).json()["aborted"]
    assert set(aborted) == ids
    for stream in streams:
        assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "abort"
