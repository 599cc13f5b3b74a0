"""Version 2 of Cohere's chats through a real gateway, by its own SDK."""

from __future__ import annotations

import json
from typing import Any

import cohere
import msgspec
import pytest
from cohere.core.api_error import ApiError

from services.gateway.api.cohere.request import read_cohere_chat
from services.gateway.api.generation import RequestLimits
from shared.bus.memory_bus import MemoryBus
from shared.messages.dialects import Dialect
from shared.messages.tokenizer import ChatPrompt, Tokenize
from tests.actors.gateway.test_tool_calls import PARIS, ROME, SCHEMA, speaking
from tests.support.gateway.fake_services import CARD, MODEL, said
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack
from tests.support.gateway.tool_calls import written

HELLO: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
DOCUMENT: Any = {"type": "document", "document": {"data": {"wind": 3}, "id": "7"}}


def client_of(stack: GatewayStack, path: str = "") -> cohere.AsyncClientV2:
    return cohere.AsyncClientV2("key-1", base_url=stack.url + path)


async def test_a_stream_says_what_the_whole_answer_says(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus) as stack, client_of(stack) as client, client_of(stack, "/cohere") as vllms:
        fields: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "logprobs": True}
        whole: Any = await vllms.chat(**fields)
        with pytest.raises(ApiError) as refused:
            await vllms.chat(model="other", messages=HELLO)
        assert (refused.value.status_code, "does not exist" in refused.value.body["message"]) == (404, True)
        events: list[Any] = [event async for event in client.chat_stream(**fields)]
    [part] = whole.message.content
    assert (part.type, part.text, whole.finish_reason) == ("text", said(8), "MAX_TOKENS")
    assert whole.usage.tokens.output_tokens == 8
    first, begun, *deltas, ended, last = events
    kinds = [event.type for event in (first, begun, ended, last)]
    assert kinds == ["message-start", "content-start", "content-end", "message-end"]
    assert {event.type for event in deltas} == {"content-delta"}
    assert "".join(each.delta.message.content.text for each in deltas) == part.text
    assert (last.delta.finish_reason, last.delta.usage) == ("MAX_TOKENS", whole.usage)
    numbers = [number for each in deltas if each.logprobs for number in each.logprobs.logprobs]
    assert [each.logprobs for each in whole.logprobs] == [[number] for number in numbers]
    assert len(numbers) == 8


async def test_thoughts_and_calls_are_told_apart_and_go_back_as_they_came(memory_bus: MemoryBus) -> None:
    text = "<think>hm</think>Look: " + written("hermes", [PARIS, ROME])
    dialect = Dialect("hermes", "qwen3", documents=True)
    async with speaking(memory_bus, text, dialect) as stack, client_of(stack) as client:
        fields: Any = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "thinking": {"type": "enabled"}}
        whole: Any = await client.chat(**fields)
        events: list[Any] = [event async for event in client.chat_stream(**fields)]
        assert whole.finish_reason == "TOOL_CALL"
        shown = [(part.type, getattr(part, part.type).strip()) for part in whole.message.content]
        assert (shown, whole.message.tool_plan.strip()) == ([("thinking", "hm")], "Look:")
        texts = [event.delta.message.content for event in events if event.type == "content-delta"]
        assert "".join(each.text or "" for each in texts).strip() == "Look:", "no plan, as calls are not known of yet"
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in whole.message.tool_calls]
        assert calls == [(call.name, call.arguments) for call in (PARIS, ROME)]
        assert [event.index for event in events if event.type == "tool-call-start"] == [0, 1]
        streamed = {0: "", 1: ""}
        for event in events:
            if event.type == "tool-call-delta":
                streamed[event.index] += event.delta.message.tool_calls.function.arguments
        assert list(streamed.values()) == [call.function.arguments for call in whole.message.tool_calls]
        result = [{"type": "text", "text": "sunny"}, DOCUMENT]
        answered = {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": result}
        documents: Any = ["one", {"data": {"title": "two"}, "id": "2"}]
        went_on: Any = [*HELLO, whole.message, answered]
        await client.chat(model=MODEL, messages=went_on, documents=documents, tools=TOOLS)
        prompt = [each.prompt for each in stack.ring.seen if isinstance(each, Tokenize)][-1]
    assert isinstance(prompt, ChatPrompt)
    said_before, result_of = json.loads(prompt.messages)[2:]
    assert (said_before["reasoning_content"], said_before["content"].strip()) == ("hm", "Look:")
    assert len(said_before["tool_calls"]) == 2
    assert result_of["content"] == 'sunny\n{"wind":3,"id":"7"}'
    assert prompt.template_kwargs["documents"] == [{"text": "one"}, {"title": "two", "id": "2"}]


def test_a_schema_has_two_names() -> None:
    def read(name: str, schema: dict[str, Any]) -> Any:
        body = {"model": MODEL, "messages": HELLO, "response_format": {"type": "json_object", name: schema}}
        return read_cohere_chat(msgspec.json.encode(body), [CARD], RequestLimits(), None)

    shape = {"type": "object", "properties": {"city": {"type": "string"}}}
    assert read("schema", shape) == read("json_schema", shape) != read("schema", {"type": "object"})


async def test_what_has_no_effect_here_is_refused_by_name(memory_bus: MemoryBus) -> None:
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"documents": ["a"]}, "documents"),
        ({"citation_options": {"mode": "FAST"}}, "citation_options"),
        ({"safety_mode": "STRICT"}, "safety_mode"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": {}, "json_schema": {}}}, "response_format.schema"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"p": 2.0}, "p: 2.0"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"strict_tools": True}, "strict_tools"),
        ({"tool_choice": "REQUIRED"}, "tool_choice"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"),
        ({"model": "none"}, "The model `none` does not exist."),
    ]
    async with gateway_stack(memory_bus) as stack, client_of(stack) as client:
        for fields, word in refusals:
            with pytest.raises(ApiError) as refused:
                await client.chat(**({"model": MODEL, "messages": HELLO} | fields))
            assert refused.value.status_code == (404 if "model" in fields else 400)
            assert refused.value.body["message"].startswith(word), refused.value.body
