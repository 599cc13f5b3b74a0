"""Anthropic's API on the whole stack, by its own SDK: the same model says the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
from anthropic import AsyncAnthropic, BadRequestError, NotFoundError
from openai import AsyncOpenAI

from tests.support.cluster.conversations import QUESTIONS
from tests.support.cluster.stack import RunningStack

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 24}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def stack(ring: RunningStack) -> RunningStack:
    return ring


@pytest.fixture
async def anthropic(stack: RunningStack) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=stack.url, api_key="unused", max_retries=0) as client:
        yield client


async def test_answers_and_counts_are_those_of_chats(
    stack: RunningStack, client: AsyncOpenAI, anthropic: AsyncAnthropic
) -> None:
    for question in QUESTIONS[:3]:
        messages: Any = [{"role": "user", "content": question}]
        chat = await client.chat.completions.create(model=stack.model, messages=messages, temperature=0, max_tokens=40)
        asked: Any = {"model": stack.model, "messages": messages, "max_tokens": 40, "extra_body": {"temperature": 0}}
        message = await anthropic.messages.create(**asked)
        async with anthropic.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        counted = await anthropic.messages.count_tokens(model=stack.model, messages=messages)
        text = (chat.choices[0].message.content or "").strip()
        assert [block.text.strip() for block in message.content] == [text]  # type: ignore[union-attr]
        assert [block.text.strip() for block in streamed.content] == [text]  # type: ignore[union-attr]
        assert chat.usage is not None
        for usage in (message.usage, streamed.usage):
            assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens
            assert usage.output_tokens == chat.usage.completion_tokens
        assert counted.input_tokens == chat.usage.prompt_tokens
        ends = {"stop": "end_turn", "length": "max_tokens"}
        assert message.stop_reason == streamed.stop_reason == ends[chat.choices[0].finish_reason]


async def test_an_answer_goes_on_from_a_last_turn_of_the_assistants(
    stack: RunningStack, anthropic: AsyncAnthropic
) -> None:
    question: Any = {"role": "user", "content": "What is the capital of France?"}
    asked: Any = {"model": stack.model, "max_tokens": 40, "extra_body": {"temperature": 0}}
    whole = (await anthropic.messages.create(messages=[question], **asked)).content[0].text  # type: ignore[union-attr]
    begun = whole[: whole.index(" ", len(whole) // 3)]
    turns: Any = [question, {"role": "assistant", "content": begun}]
    rest = await anthropic.messages.create(messages=turns, **asked)
    assert begun + rest.content[0].text == whole  # type: ignore[union-attr]
    counted = await anthropic.messages.count_tokens(model=stack.model, messages=turns)
    assert counted.input_tokens == rest.usage.input_tokens + (rest.usage.cache_read_input_tokens or 0)


async def test_models_and_requests_are_named_as_the_sdk_looks_for_them(
    stack: RunningStack, anthropic: AsyncAnthropic
) -> None:
    shown = [model async for model in anthropic.models.list()]
    [model] = [each for each in shown if each.id == stack.model]
    assert (model.type, model.display_name) == ("model", stack.model)
    assert model == await anthropic.models.retrieve(stack.model)
    with pytest.raises(NotFoundError):
        await anthropic.models.retrieve("none")
    asked: Any = {"model": stack.model, "messages": [{"role": "user", "content": "Hello"}]}
    message = await anthropic.messages.create(max_tokens=1, extra_headers={"x-request-id": "mine"}, **asked)
    assert message._request_id == "mine"
    with pytest.raises(BadRequestError) as refused:
        await anthropic.messages.create(max_tokens=0, extra_headers={"x-request-id": "wrong"}, **asked)
    assert refused.value.request_id == "wrong"


async def test_documents_are_read_and_what_fills_the_context_says_so(
    stack: RunningStack, anthropic: AsyncAnthropic
) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    question = {"type": "text", "text": "Tell a story."}
    turns: Any = [{"role": "user", "content": [{"type": "document", "source": source}, question]}]
    same: Any = [{"role": "ctx", "content": "<document>\nIt rains.\n</document>\nTell a story."}]
    read, written = [await anthropic.messages.count_tokens(model=stack.model, messages=each) for each in (turns, same)]
    assert read.input_tokens == written.input_tokens
    context = (await anthropic.models.retrieve(stack.model)).max_input_tokens
    assert context is not None
    filling: Any = [{"role": "user", "content": "one " * (context - 64)}]
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 900}}, "required": ["a"]}
    keep_all: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    filled = await anthropic.beta.messages.create(
        model=stack.model,
        messages=filling,
        max_tokens=context,
        context_management=keep_all,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert filled.stop_reason == "model_context_window_exceeded"
    cached = filled.usage.cache_read_input_tokens or 0
    assert filled.usage.input_tokens + cached + filled.usage.output_tokens == context


async def test_a_stop_sequence_is_named(stack: RunningStack, anthropic: AsyncAnthropic) -> None:
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    message = await anthropic.messages.create(
        model=stack.model, messages=question, max_tokens=40, stop_sequences=["Paris"], extra_body={"temperature": 0}
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in str(message.content)


async def test_tools_are_called_and_answers_match_their_schema(stack: RunningStack, anthropic: AsyncAnthropic) -> None:
    question: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
    asked: Any = {"model": stack.model, "messages": question, "max_tokens": 100, "extra_body": {"temperature": 0}}
    tools: Any = [{"name": "get_weather", "input_schema": CITY}]
    message = await anthropic.messages.create(**asked, tools=tools, tool_choice={"type": "any"})
    assert message.stop_reason == "tool_use"
    [call] = [block for block in message.content if block.type == "tool_use"]
    jsonschema.validate(call.input, CITY)
    result: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]
    turns: Any = [*question, {"role": "assistant", "content": message.content}, {"role": "user", "content": result}]
    answer = await anthropic.messages.create(**(asked | {"messages": turns}), tools=tools)
    assert answer.content
    described: Any = {"format": {"type": "json_schema", "schema": CITY}}
    structured = await anthropic.messages.create(**asked, output_config=described)
    [block] = structured.content
    jsonschema.validate(json.loads(block.text), CITY)  # type: ignore[union-attr]


async def test_results_of_tools_are_cleared_where_a_prompt_is_too_long(
    stack: RunningStack, anthropic: AsyncAnthropic
) -> None:
    def turns(result: str) -> Any:
        call = {"type": "tool_use", "id": "t", "name": "get_weather", "input": {}}
        answer = {"type": "tool_result", "tool_use_id": "t", "content": result}
        return [
            {"role": "user", "content": "Rome?"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [answer]},
        ]

    beta, tools = anthropic.beta.messages, [{"name": "get_weather", "input_schema": CITY}]
    asked: Any = {"model": stack.model, "messages": turns("sunny " * 90), "tools": tools}
    edit: Any = {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 0}}
    whole = (await beta.count_tokens(**asked)).input_tokens
    cleared = await beta.count_tokens(**(asked | {"messages": turns("[cleared to save context]")}))
    free = whole - cleared.input_tokens
    for above, at_least, applied in ((whole - 1, free, True), (whole, 0, False), (1, free + 1, False)):
        trigger, least = ({"type": "input_tokens", "value": value} for value in (above, at_least))
        managed: Any = {"edits": [edit | {"trigger": trigger, "clear_at_least": least}]}
        counted = await beta.count_tokens(**asked, context_management=managed)
        assert counted.input_tokens == (cleared.input_tokens if applied else whole)
        assert counted.context_management is not None
        assert counted.context_management.original_input_tokens == whole
        answer = await beta.create(**asked, context_management=managed, max_tokens=1)
        assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted.input_tokens
        assert answer.context_management is not None
        said = [(each.cleared_tool_uses, each.cleared_input_tokens) for each in answer.context_management.applied_edits]  # type: ignore[union-attr]
        assert said == ([(1, free)] if applied else [])
    async with beta.stream(
        **asked, context_management={"edits": [edit | {"trigger": {"type": "input_tokens", "value": 1}}]}, max_tokens=1
    ) as stream:
        final = await stream.get_final_message()
    assert final.context_management is not None
    assert len(final.context_management.applied_edits) == 1
