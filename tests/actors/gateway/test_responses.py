"""OpenAI's Responses API, from its own SDK through a real gateway to a scripted model."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from shared.bus.memory_bus import MemoryBus
from shared.messages.dialects import Dialect
from shared.messages.tokenizer import Tokenize
from tests.actors.gateway.test_tool_calls import PARIS, ROME, SCHEMA, speaking
from tests.support.gateway.fake_services import MODEL, eventually, said, word
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack
from tests.support.gateway.tool_calls import written

HELLO = "what is the weather"
TOOLS: Any = [{"type": "function", "name": "weather", "description": "Tells it.", "parameters": SCHEMA}]
LOGPROBS: Any = ["message.output_text.logprobs"]


@pytest.fixture
async def stack(memory_bus: MemoryBus) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus) as stack:
        yield stack


async def create(stack: GatewayStack, **fields: Any) -> Any:
    return await stack.openai.responses.create(**({"model": MODEL, "input": HELLO} | fields))


async def streamed(stack: GatewayStack, **fields: Any) -> list[Any]:
    """The events, which are numbered without gaps."""
    events = [event async for event in await create(stack, stream=True, **fields)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


async def test_a_response_is_the_same_streamed_and_whole(stack: GatewayStack) -> None:
    whole = await create(stack, max_output_tokens=8, metadata={"a": "b"}, instructions="Be short.")
    assert whole.id.startswith("resp_")
    assert (whole.object, whole.model, whole.status) == ("response", MODEL, "incomplete")
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert (whole.output_text, whole.metadata, whole.instructions) == (said(8), {"a": "b"}, "Be short.")
    assert (whole.error, whole.tools, whole.tool_choice, whole.store) == (None, [], "auto", False)
    assert whole.usage.output_tokens == 8
    assert whole.usage.total_tokens == whole.usage.input_tokens + 8
    assert whole.usage.input_tokens_details.cached_tokens > 0
    events = await streamed(stack, max_output_tokens=8, metadata={"a": "b"}, instructions="Be short.")
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    last = events[-1].response
    assert "".join(event.delta for event in events[4:-4]) == last.output_text == whole.output_text
    assert (last.usage, last.incomplete_details) == (whole.usage, whole.incomplete_details)
    assert events[0].response.status == "in_progress"
    assert {event.response.id for event in (events[0], events[1], events[-1])} == {last.id}


async def test_tools_and_reasoning_are_items(memory_bus: MemoryBus) -> None:
    text = "<think>Which city?</think>\n\nLet me look.\n" + written("hermes", [PARIS, ROME])
    async with speaking(memory_bus, text, Dialect("hermes", "qwen3")) as stack:
        whole = await create(stack, tools=TOOLS)
        async with stack.openai.responses.stream(model=MODEL, input=HELLO, tools=TOOLS) as stream:
            kinds = Counter([event.type.removeprefix("response.") async for event in stream])
            streaming = await stream.get_final_response()
        for response in (whole, streaming):
            assert response.status == "completed"
            assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
            reasoning, _, *calls = response.output
            assert [part.text for part in reasoning.content] == ["Which city?"]
            assert response.output_text == "Let me look."
            assert [(call.name, json.loads(call.arguments)) for call in calls] == [
                ("weather", PARIS.arguments),
                ("weather", ROME.arguments),
            ]
            assert len({call.call_id for call in calls}) == 2
            assert 0 < response.usage.output_tokens_details.reasoning_tokens < 10
        assert kinds["output_item.added"] == kinds["output_item.done"] == 4
        assert kinds["content_part.added"] == kinds["content_part.done"] == 2
        assert kinds["function_call_arguments.delta"] > 4
        assert kinds["function_call_arguments.done"] == 2
        assert kinds["reasoning_text.delta"] > 1
        assert kinds["reasoning_text.done"] == kinds["completed"] == 1
        results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "dry"} for call in calls]
        turns: Any = [{"role": "user", "content": HELLO}, *whole.output, *results]
        assert (await create(stack, input=turns, tools=TOOLS)).status == "completed"


async def test_reasoning_is_left_out_where_a_client_says_so(memory_bus: MemoryBus) -> None:
    text = "<think>Which city?</think>\n\nLet me look.\n"
    async with speaking(memory_bus, text, Dialect("hermes", "qwen3")) as stack:
        asked: Any = {"extra_body": {"include_reasoning": False}}
        whole = await create(stack, **asked)
        events = await streamed(stack, **asked)
        for response in (whole, events[-1].response):
            assert [item.type for item in response.output] == ["message"]
            assert (response.status, response.output_text) == ("completed", "Let me look.\n")
        assert not [event.type for event in events if "reasoning" in event.type]


async def test_a_client_may_name_a_response_that_is_not_stored(stack: GatewayStack) -> None:
    named: Any = {"extra_body": {"request_id": "resp_mine", "session_id": "monday"}, "max_output_tokens": 3}
    twice = await asyncio.gather(create(stack, **named), create(stack, **named))
    assert [(response.id, response.output_text) for response in twice] == [("resp_mine", said(3))] * 2
    events = await streamed(stack, **named)
    assert {event.response.id for event in (events[0], events[-1])} == {"resp_mine"}
    with pytest.raises(openai.BadRequestError, match="request_id"):
        await create(stack, extra_body={"request_id": "mine and yours"})


class Weather(BaseModel):
    """What the SDK parses an answer as."""

    city: str
    days: int


async def test_the_sdk_parses_structured_outputs(memory_bus: MemoryBus) -> None:
    async with speaking(memory_bus, json.dumps(ROME.arguments), Dialect()) as stack:
        parsed = await stack.openai.responses.parse(model=MODEL, input=HELLO, text_format=Weather)
        assert parsed.output_parsed == Weather(**ROME.arguments)
        async with stack.openai.responses.stream(model=MODEL, input=HELLO, text_format=Weather) as stream:
            assert (await stream.get_final_response()).output_parsed == parsed.output_parsed
        [asked] = {each.grammar for each in stack.ring.seen if isinstance(each, Tokenize)}
        assert asked is not None
        assert asked.kind == "json"


async def test_logprobs_are_those_of_the_text(stack: GatewayStack) -> None:
    fields: Any = {"include": LOGPROBS, "top_logprobs": 2, "max_output_tokens": 5}
    whole = await create(stack, **fields)
    [part] = whole.output[0].content
    assert [each.token for each in part.logprobs] == [word(i) for i in range(5)]
    assert [len(each.top_logprobs) for each in part.logprobs] == [2] * 5
    events = await streamed(stack, **fields)
    deltas = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    assert [(each.token, each.logprob) for each in deltas] == [(each.token, each.logprob) for each in part.logprobs]
    assert (await create(stack, max_output_tokens=5)).output[0].content[0].logprobs == []


async def test_a_stream_that_loses_its_engine_goes_on_where_it_was(stack: GatewayStack) -> None:
    events = await streamed(stack, input="LOSE", max_output_tokens=8)
    assert events[-1].response.output_text == said(8)
    assert [each.attempt for each in stack.ring.seen if isinstance(each, Tokenize)] == [1, 2]


async def test_a_client_that_leaves_frees_its_request(stack: GatewayStack) -> None:
    stack.ring.step = 0.02
    stream = await create(stack, stream=True, max_output_tokens=10_000)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await eventually(lambda: bool(stack.ring.cancelled))
    await eventually(lambda: len(stack.gateway.requests) == 0)


async def test_an_error_within_a_stream_is_a_failed_response(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus, attempts=1) as stack:
        events = await streamed(stack, input="FAIL ALWAYS", max_output_tokens=8)
        assert events[-1].type == "response.failed"
        assert (events[-1].response.status, events[-1].response.error.code) == ("failed", "server_error")
        assert events[-2].type == "response.output_text.delta"


async def test_errors_are_those_that_the_sdk_knows(stack: GatewayStack) -> None:
    for field, value in {"conversation": "c", "background": True, "tools": [{"type": "web_search"}]}.items():
        with pytest.raises(openai.BadRequestError, match=field) as bad:
            await create(stack, **{field: value})
        assert str(bad.value.param).startswith(field)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await create(stack, model="other")
    with pytest.raises(openai.BadRequestError, match="too long") as bad:
        await create(stack, input="REJECT")
    assert bad.value.param == "input"
