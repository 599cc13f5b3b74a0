"""Anthropic's API, from its own SDK through a real gateway to a scripted model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from shared.bus.memory_bus import MemoryBus
from shared.messages.dialects import Dialect
from shared.messages.tokenizer import Tokenize
from tests.actors.gateway.test_tool_calls import PARIS, ROME, SCHEMA, speaking
from tests.support.gateway.fake_services import MODEL, eventually, said
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack
from tests.support.gateway.tool_calls import written

HELLO: Any = [{"role": "user", "content": "what is the weather"}]
TOOLS: Any = [{"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}]
THINK: Any = {"type": "enabled", "budget_tokens": 1024}


@asynccontextmanager
async def client_of(stack: GatewayStack) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=stack.url, api_key="key-1", max_retries=0, http_client=stack.http) as client:
        yield client


@pytest.fixture
async def client(memory_bus: MemoryBus) -> AsyncIterator[AsyncAnthropic]:
    async with gateway_stack(memory_bus) as stack, client_of(stack) as client:
        yield client


async def streamed(client: AsyncAnthropic, **fields: Any) -> tuple[list[str], Any]:
    """The types of the events, and the message that the SDK makes of them."""
    async with client.messages.stream(model=MODEL, **({"messages": HELLO, "max_tokens": 99} | fields)) as stream:
        kinds = [event.type async for event in stream]
        return kinds, await stream.get_final_message()


async def test_a_message_is_the_same_streamed_and_whole(client: AsyncAnthropic) -> None:
    whole = await client.messages.create(model=MODEL, messages=HELLO, max_tokens=8)
    assert whole.id.startswith("msg_")
    assert (whole.role, whole.model, whole.type) == ("assistant", MODEL, "message")
    [text] = whole.content
    assert (text.type, text.text) == ("text", said(8))
    assert (whole.stop_reason, whole.stop_sequence) == ("max_tokens", None)
    usage = whole.usage
    assert usage.output_tokens == 8
    assert (usage.cache_read_input_tokens or 0) > 0
    kinds, streaming = await streamed(client, max_tokens=8)
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.text for block in streaming.content] == [said(8)]
    assert streaming.stop_reason == whole.stop_reason
    assert streaming.usage.output_tokens == 8
    assert streaming.usage.input_tokens == usage.input_tokens


async def test_tools_and_thoughts_are_blocks(memory_bus: MemoryBus) -> None:
    text = "<think>Which city?</think>\n\nLet me look.\n" + written("hermes", [PARIS, ROME])
    dialect = Dialect("hermes", "qwen3")
    async with speaking(memory_bus, text, dialect) as stack, client_of(stack) as client:
        whole = await client.messages.create(model=MODEL, messages=HELLO, max_tokens=2000, tools=TOOLS, thinking=THINK)
        kinds, streaming = await streamed(client, tools=TOOLS, thinking=THINK, max_tokens=2000)
        for message in (whole, streaming):
            assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
            thinking, answer, *calls = message.content
            assert thinking.thinking.strip() == "Which city?"
            assert answer.text == "Let me look."
            assert [(call.name, call.input) for call in calls] == [
                ("weather", PARIS.arguments),
                ("weather", ROME.arguments),
            ]
            assert message.stop_reason == "tool_use"
            assert len({call.id for call in calls}) == 2
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
        without = await client.messages.create(model=MODEL, messages=HELLO, max_tokens=2000, tools=TOOLS)
        assert [block.type for block in without.content] == ["text", "tool_use", "tool_use"]


async def test_a_stream_that_loses_its_engine_goes_on_where_it_was(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus) as stack, client_of(stack) as client:
        _, message = await streamed(client, messages=[{"role": "user", "content": "LOSE"}], max_tokens=8)
        assert message.content[0].text == said(8)
        assert [each.attempt for each in stack.ring.seen if isinstance(each, Tokenize)] == [1, 2]


async def test_a_client_that_leaves_frees_its_request(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus) as stack, client_of(stack) as client:
        stack.ring.step = 0.02
        async with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=10_000) as stream:
            async for event in stream:
                if event.type == "text":
                    break
        await eventually(lambda: bool(stack.ring.cancelled))
        await eventually(lambda: len(stack.gateway.requests) == 0)


async def test_tokens_are_counted_without_generating(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus) as stack, client_of(stack) as client:
        counted = await client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be short.")
        assert counted.input_tokens > 0
        assert not [each for each in stack.ring.seen if isinstance(each, Tokenize)]


async def test_errors_are_those_that_the_sdk_knows(client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        await client.messages.create(model=MODEL, messages=HELLO, max_tokens=0)
    body: Any = bad.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert "max_tokens" in bad.value.message
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await client.messages.create(model="other", messages=HELLO, max_tokens=1)
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as unknown:
        await client.models.retrieve("other")
    shown: Any = unknown.value.body
    assert (shown["type"], shown["error"]["type"]) == ("error", "not_found_error")
    assert unknown.value.request_id is not None
    assert (await client.models.retrieve(MODEL))._request_id is not None
    with pytest.raises(anthropic.BadRequestError, match="container"):
        await client.messages.create(model=MODEL, messages=HELLO, max_tokens=1, container="c")


async def test_the_key_may_come_as_the_sdk_sends_it(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus, api_keys=("key-1",)) as stack, client_of(stack) as client:
        assert (await client.messages.create(model=MODEL, messages=HELLO, max_tokens=1)).content
        stranger = client.with_options(api_key="key-2")
        with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
            await stranger.messages.create(model=MODEL, messages=HELLO, max_tokens=1)
