"""Tools on the demo model, through the whole stack, by the `openai` SDK."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai import AsyncOpenAI

from tests.support.cluster.conversations import client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.paths import DEMO_MODEL

AT_ONCE = 16


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WORD = {"type": "string", "maxLength": 24}
WEATHER, TIMER = tool("get_weather", city={"type": "string"}), tool("set_timer", minutes={"type": "integer"})
MEETING = tool(
    "plan_meeting",
    title=WORD,
    minutes={"type": "integer", "minimum": 5, "maximum": 480},
    kind={"enum": ["call", "visit", None]},
    guests={"type": "array", "items": {"$ref": "#/$defs/guest"}, "minItems": 1, "maxItems": 3},
)
MEETING["function"]["parameters"]["$defs"] = {
    "guest": {
        "type": "object",
        "properties": {"name": WORD, "remote": {"type": "boolean"}},
        "required": ["name"],
        "additionalProperties": False,
    }
}
LIGHT = tool("set_light", room={"enum": ["kitchen", "hall"]}, level={"enum": [0, 0.5, 1]})
ALARM = tool("set_alarm", minutes={"type": "integer", "minimum": 1, "maximum": 600})
TOOLS: list[Any] = [tool("get_weather", city=WORD), ALARM, MEETING, LIGHT]
"""Texts and numbers are bounded: a small model that is forced to say what it would not may find no end."""
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
QUESTIONS = (
    "What is the weather in Rome?",
    "Tell me a story.",
    "Set a timer for 12 minutes.",
    "What is 3 + 4?",
    "Plan a meeting with Anna and Tom.",
    "Make the light in the kitchen red.",
)
FORMATS = ("hermes", "llama3_json", "mistral", "qwen3_xml", "pythonic")


@pytest.fixture(scope="module")
def stack(ring: RunningStack) -> RunningStack:
    return ring


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def ask(client: AsyncOpenAI, stack: RunningStack, messages: list[Any], **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 300} | fields
    return (await client.chat.completions.create(model=stack.model, messages=messages, **fields)).choices[0]


async def streamed(client: AsyncOpenAI, stack: RunningStack, messages: list[Any], **fields: Any) -> Any:
    """The choice that the SDK makes of a stream's chunks."""
    async with client.chat.completions.stream(
        model=stack.model, messages=messages, **({"temperature": 0, "max_tokens": 300} | fields)
    ) as stream:
        return (await stream.get_final_completion()).choices[0]


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]


def check(choice: Any) -> None:
    """At least one call, each valid."""
    calls = calls_of(choice)
    assert choice.finish_reason == "tool_calls", choice
    assert calls
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("forced_calls", [16, pytest.param(200, marks=pytest.mark.slow)])
async def test_forced_calls_are_valid_every_time(stack: RunningStack, client: AsyncOpenAI, forced_calls: int) -> None:
    """Drawn at temperature 1 by a model that was never trained on half of these tools."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        name = list(SCHEMAS)[number % len(SCHEMAS)]
        forced: Any = {"type": "function", "function": {"name": name}} if number % 2 else "required"
        async with places:
            choice = await ask(
                client,
                stack,
                user(QUESTIONS[number % len(QUESTIONS)]),
                tools=TOOLS,
                tool_choice=forced,
                parallel_tool_calls=False,
                temperature=1,
                seed=number,
                stream=False,
            )
        check(choice)
        if number % 2:
            assert [called for called, _ in calls_of(choice)] == [name]

    async with asyncio.TaskGroup() as group:
        for number in range(forced_calls):
            group.create_task(one(number))


async def test_the_model_calls_what_it_was_trained_to(stack: RunningStack, client: AsyncOpenAI) -> None:
    for fields in ({}, {"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}, TIMER]}):
        asked: dict[str, Any] = {"tools": [WEATHER, TIMER]} | fields
        choice = await ask(client, stack, user("What is the weather in Paris?"), **asked)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert calls_of(choice) == [("get_weather", '{"city": "Paris"}')]
        said = await streamed(client, stack, user("What is the weather in Paris?"), **asked)
        assert (said.finish_reason, calls_of(said)) == ("tool_calls", calls_of(choice))


async def test_a_tools_result_is_told(stack: RunningStack, client: AsyncOpenAI) -> None:
    messages = user("What is the weather in Paris?")
    choice = await ask(client, stack, messages, tools=[WEATHER, TIMER])
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id}
    messages += [choice.message, result | {"content": '{"weather": "sunny", "degrees": 21}'}]
    told = await ask(client, stack, messages, tools=[WEATHER, TIMER])
    assert (told.finish_reason, calls_of(told)) == ("stop", [])
    assert "sunny" in told.message.content
    assert "21" in told.message.content


async def test_nothing_is_called_where_nothing_may_be(stack: RunningStack, client: AsyncOpenAI) -> None:
    choice = await ask(client, stack, user("What is the weather in Paris?"), tools=TOOLS, tool_choice="none")
    assert (choice.finish_reason, calls_of(choice)) == ("stop", [])
    assert "<tool_call>" not in choice.message.content


async def test_a_stream_comes_to_the_same_as_a_body(stack: RunningStack, client: AsyncOpenAI) -> None:
    for number, question in enumerate(QUESTIONS[:4]):
        fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "temperature": 1, "seed": number}
        fields["parallel_tool_calls"] = False
        whole = await ask(client, stack, user(question), **fields)
        said = await streamed(client, stack, user(question), **fields)
        assert (calls_of(said), said.finish_reason) == (calls_of(whole), whole.finish_reason)


async def test_an_answer_may_be_a_call_or_what_its_format_says(stack: RunningStack, client: AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER, TIMER], "response_format": {"type": "json_object"}}
    check(await ask(client, stack, user("What is the weather in Paris?"), **fields))
    choice = await ask(client, stack, user("What is the capital of France?"), **fields, seed=1)
    assert calls_of(choice) or isinstance(json.loads(choice.message.content), dict)


async def test_a_schema_that_cannot_be_compiled_is_refused(stack: RunningStack, client: AsyncOpenAI) -> None:
    broken = tool("f", a={"type": "string", "pattern": "("})
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(client, stack, user("Hello"), tools=[broken], tool_choice="required")
    assert refused.value.param == "tool_choice"
    assert "parenthesis" in refused.value.message


@pytest.fixture
def thinking_template(tmp_path: Path) -> Path:
    """The demo model's, with thoughts opened at the prompt's end."""
    source = (
        (DEMO_MODEL / "chat_template.jinja")
        .read_text()
        .replace("{{- '<|assistant|>' -}}", "{{- '<|assistant|><think>\\n' -}}")
    )
    assert "<think>" in source
    path = tmp_path / "thinking.jinja"
    path.write_text(source)
    return path


@pytest.mark.slow
async def test_a_call_is_forced_behind_thoughts_of_bounded_length(tmp_path: Path, thinking_template: Path) -> None:
    """The demo model was not taught to think, so what it thinks is of no interest, but its budget ends it."""
    with running_stack(tmp_path, settings=(f"tokenizer.chat_template={thinking_template}",)) as stack:
        async with client_of(stack.url) as client:
            for number, question in enumerate(QUESTIONS):
                fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
                fields["extra_body"] = {"thinking_token_budget": 6, "ignore_eos": False}
                choice = await (streamed if number % 2 else ask)(client, stack, user(question), **fields)
                check(choice)
                if number % 2 == 0:
                    assert choice.message.reasoning_content
                    assert "think>" not in choice.message.reasoning_content
                    assert choice.message.content is None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", FORMATS)
async def test_calls_are_forced_in_every_format(tmp_path_factory: pytest.TempPathFactory, form: str) -> None:
    """The demo model knows one of them; a grammar makes it write the others."""
    with running_stack(tmp_path_factory.mktemp(form), settings=(f"gateway.tool_call_parser={form}",)) as stack:
        async with client_of(stack.url) as client:
            for number in range(8):
                name = list(SCHEMAS)[number % len(SCHEMAS)]
                fields: dict[str, Any] = {"tools": TOOLS, "temperature": 1, "seed": number, "max_tokens": 500}
                fields["tool_choice"] = {"type": "function", "function": {"name": name}}
                check(await (streamed if number % 3 else ask)(client, stack, user(QUESTIONS[number % 6]), **fields))
