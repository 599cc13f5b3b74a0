"""OpenAI's Responses API on the whole stack, by its own SDK: the same model says the same."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI

from tests.support.cluster.conversations import QUESTIONS, client_of
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


async def test_answers_and_counts_are_those_of_chats(stack: RunningStack, client: AsyncOpenAI) -> None:
    ends = {"stop": "completed", "length": "incomplete"}
    for question in QUESTIONS[:3]:
        messages: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": question}]
        chat = await client.chat.completions.create(model=stack.model, messages=messages, temperature=0, max_tokens=40)
        asked: Any = {"model": stack.model, "input": question, "instructions": "Be kind.", "temperature": 0}
        whole = await client.responses.create(**asked, max_output_tokens=40)
        stream: Any = await client.responses.create(**asked, max_output_tokens=40, stream=True)
        streamed = [event async for event in stream][-1].response
        assert chat.usage is not None
        for response in (whole, streamed):
            assert response.output_text == chat.choices[0].message.content
            assert response.status == ends[chat.choices[0].finish_reason]
            assert response.usage.input_tokens == chat.usage.prompt_tokens
            assert response.usage.output_tokens == chat.usage.completion_tokens


async def test_a_stored_response_is_gone_on_from_as_a_chat_is(stack: RunningStack, client: AsyncOpenAI) -> None:
    asked: Any = {"model": stack.model, "temperature": 0}
    first = await client.responses.create(**asked, input=QUESTIONS[0], max_output_tokens=30)
    second = await client.responses.create(
        **asked, input=QUESTIONS[1], max_output_tokens=30, previous_response_id=first.id
    )
    messages: Any = [
        {"role": "user", "content": QUESTIONS[0]},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": QUESTIONS[1]},
    ]
    chat = await client.chat.completions.create(**asked, messages=messages, max_tokens=30)
    assert second.output_text == chat.choices[0].message.content
    assert chat.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    assert await client.responses.retrieve(second.id) == second
    begun = await client.responses.create(
        **asked, input=QUESTIONS[1], max_output_tokens=30, previous_response_id=first.id, background=True
    )
    events = [event async for event in await client.responses.retrieve(begun.id, stream=True)]
    assert events[-1].response == await client.responses.retrieve(begun.id)  # type: ignore[union-attr]
    assert events[-1].response.output_text == second.output_text  # type: ignore[union-attr]
    await client.responses.delete(second.id)


async def test_a_stored_chat_and_items_that_are_referred_to_are_found_at_any_gateway(
    stack: RunningStack, client: AsyncOpenAI
) -> None:
    asked: Any = {"model": stack.model, "temperature": 0}
    messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
    kept: dict[str, str] = {"of": "this test"}
    chat = await client.chat.completions.create(**asked, messages=messages, max_tokens=12, store=True, metadata=kept)
    stream = await client.chat.completions.create(
        **asked, messages=messages, max_tokens=12, store=True, metadata=kept, stream=True
    )
    streamed = [chunk async for chunk in stream][-1].id
    for _ in range(4):  # connections of their own, which either gateway may take
        async with client_of(stack.url) as other:
            chats = other.chat.completions
            found = [await chats.retrieve(each) for each in (chat.id, streamed)]
            assert [each.choices[0].message.content for each in found] == [chat.choices[0].message.content] * 2
            assert [each.id async for each in chats.list(metadata=kept)] == [chat.id, streamed]
            assert [each.content async for each in chats.messages.list(chat.id)] == [QUESTIONS[0]]
    for each in (chat.id, streamed):
        assert (await client.chat.completions.delete(each)).deleted
    first = await client.responses.create(**asked, input=QUESTIONS[0], max_output_tokens=12)
    [question] = [item.id async for item in client.responses.input_items.list(first.id)]
    named: Any = [{"type": "item_reference", "id": each} for each in (question, first.output[0].id)]
    whole: Any = [messages[0], {"role": "assistant", "content": first.output_text}]
    last: Any = {"role": "user", "content": QUESTIONS[1]}
    second = await client.responses.create(**asked, input=[*named, last], max_output_tokens=12)
    again = await client.chat.completions.create(**asked, messages=[*whole, last], max_tokens=12)
    assert second.output_text == again.choices[0].message.content


async def test_logprobs_are_those_of_chats(stack: RunningStack, client: AsyncOpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    asked: Any = {"model": stack.model, "temperature": 0}
    response = await client.responses.create(
        **asked, input=QUESTIONS[0], max_output_tokens=12, include=include, top_logprobs=3
    )
    chat = await client.chat.completions.create(
        **asked, messages=[{"role": "user", "content": QUESTIONS[0]}], max_tokens=12, logprobs=True, top_logprobs=3
    )
    assert chat.choices[0].logprobs is not None
    expected = [each.model_dump() for each in chat.choices[0].logprobs.content or []]
    [item] = response.output
    assert [each.model_dump() for each in item.content[0].logprobs] == expected[: len(item.content[0].logprobs)]  # type: ignore[union-attr]
    assert "".join(each.token for each in item.content[0].logprobs) == response.output_text  # type: ignore[union-attr]


async def test_tools_are_called_and_answers_match_their_schema(stack: RunningStack, client: AsyncOpenAI) -> None:
    asked: Any = {"model": stack.model, "max_output_tokens": 100, "temperature": 0}
    question: Any = {"role": "user", "content": "What is the weather in Rome?"}
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}]
    response = await client.responses.create(**asked, input=[question], tools=tools, tool_choice="required")
    [call] = [item for item in response.output if item.type == "function_call"]
    jsonschema.validate(json.loads(call.arguments), CITY)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = await client.responses.create(**asked, input=[question, *response.output, result], tools=tools)  # type: ignore[list-item]
    assert answer.output_text
    described: Any = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
    structured = await client.responses.create(**asked, input=[question], text=described)
    jsonschema.validate(json.loads(structured.output_text), CITY)
