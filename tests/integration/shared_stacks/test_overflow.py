"""A real stack as the provider of a gateway that has no engine of its own: the client gets what the stack says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from shared.bus.memory_bus import MemoryBus
from tests.support.cluster.conversations import QUESTIONS
from tests.support.cluster.stack import RunningStack
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack


@pytest.fixture
def stack(ring: RunningStack) -> RunningStack:
    return ring


@pytest.fixture
async def empty(memory_bus: MemoryBus, stack: RunningStack) -> AsyncIterator[GatewayStack]:
    settings: dict[str, Any] = {"overflow": f"{stack.url}/v1", "overflow_model": (f"here={stack.model}",)}
    async with gateway_stack(memory_bus, wait=False, **settings, overflow_dialect="baton") as gateway:
        yield gateway


def chat(model: str, question: str, **fields: Any) -> Any:
    return {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0, **fields}


async def test_answers_and_streams_are_those_of_the_provider(
    client: AsyncOpenAI, empty: GatewayStack, stack: RunningStack
) -> None:
    for question in QUESTIONS[:3]:
        expected = await client.chat.completions.create(**chat(stack.model, question, max_tokens=24))
        raw = await empty.openai.chat.completions.with_raw_response.create(**chat("here", question, max_tokens=24))
        assert raw.headers["x-baton-served-by"] == "overflow"
        answer = raw.parse()
        assert answer.choices == expected.choices
        assert answer.usage is not None
        assert expected.usage is not None
        assert answer.usage.completion_tokens == expected.usage.completion_tokens
        stream = await empty.openai.chat.completions.create(**chat("here", question, max_tokens=24), stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == expected.choices[0].message.content


async def test_completions_with_token_ids_reach_a_server_of_the_same_model(
    client: AsyncOpenAI, empty: GatewayStack, stack: RunningStack
) -> None:
    fields: Any = {"prompt": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0, "extra_body": {"top_k": 4}}
    expected = await client.completions.create(model=stack.model, **fields)
    answer = await empty.openai.completions.create(model="here", **fields)
    assert answer.choices == expected.choices


async def test_a_model_without_a_name_at_the_provider_gets_the_local_error(empty: GatewayStack) -> None:
    answer = await empty.http.post("/v1/chat/completions", json=chat("other", "hi"))
    assert answer.status_code == 503
    assert "no engine has announced" in answer.text or "is ready" in answer.text
