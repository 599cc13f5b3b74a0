"""Chats with tools and thoughts, from the `openai` SDK through a real gateway to a scripted model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from shared.bus.memory_bus import MemoryBus
from shared.messages.dialects import Dialect, Thinking, ToolFormat
from shared.messages.tokenizer import ChatPrompt, Tokenize
from tests.support.gateway.fake_services import MODEL, FakeRing
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack
from tests.support.gateway.tool_calls import Call, written

HELLO: Any = [{"role": "user", "content": "what is the weather"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
PARIS = Call("weather", {"city": "Paris é", "days": 3})
ROME = Call("weather", {"city": "Rome", "days": 1})


def tokens(text: str) -> list[str]:
    """Pieces as a tokenizer would make them: marks broken up."""
    return re.findall(r"\w+|\s+|[^\w\s]{1,3}", text)


@asynccontextmanager
async def speaking(
    bus: MemoryBus, text: str, dialect: Dialect, thinking: Thinking | None = None, **settings: Any
) -> AsyncIterator[GatewayStack]:
    ring = FakeRing(bus)
    ring.script, ring.dialect, ring.thinking = tokens(text), dialect, thinking
    async with gateway_stack(bus, ring=ring, **settings) as stack:
        yield stack


async def ask(stack: GatewayStack, **fields: Any) -> Any:
    return await stack.openai.chat.completions.create(model=MODEL, messages=HELLO, **fields)


async def streamed(stack: GatewayStack, **fields: Any) -> list[Any]:
    """For each choice what its chunks come to, in a message's shape."""
    stream = await ask(stack, stream=True, stream_options={"include_usage": True}, **fields)
    choices: dict[int, dict[str, Any]] = {}
    async for chunk in stream:
        for each in chunk.choices:
            _gather(choices.setdefault(each.index, {"content": "", "reasoning": "", "calls": {}, "logprobs": 0}), each)
    return [choices[index] for index in sorted(choices)]


def _gather(said: dict[str, Any], choice: Any) -> None:
    delta = choice.delta
    assert "finish" not in said, "something follows the end"
    said["content"] += delta.content or ""
    said["reasoning"] += getattr(delta, "reasoning_content", None) or ""
    assert getattr(delta, "reasoning_content", None) == getattr(delta, "reasoning", None)
    said["logprobs"] += len(choice.logprobs.content) if choice.logprobs else 0
    for call in delta.tool_calls or []:
        if call.id is not None:
            assert call.index == len(said["calls"])
            assert (call.type, call.function.arguments) == ("function", call.function.arguments)
            said["calls"][call.index] = [call.id, call.function.name, ""]
        else:
            assert call.function.name is None
        said["calls"][call.index][2] += call.function.arguments
    if choice.finish_reason is not None:
        said["finish"] = choice.finish_reason


@pytest.mark.parametrize("form", ["hermes", "mistral", "kimi_k2", "pythonic"])
async def test_calls_reach_clients_in_both_shapes(memory_bus: MemoryBus, form: ToolFormat) -> None:
    text = "Let me look.\n" + written(form, [PARIS, ROME])
    async with speaking(memory_bus, text, Dialect(form)) as stack:
        choice = (await ask(stack, tools=TOOLS)).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
        calls = choice.message.tool_calls
        assert [(call.type, call.function.name) for call in calls] == [("function", "weather")] * 2
        assert [json.loads(call.function.arguments) for call in calls] == [PARIS.arguments, ROME.arguments]
        (said,) = await streamed(stack, tools=TOOLS)
        assert (said["content"], said["finish"]) == ("Let me look.", "tool_calls")
        whole = [(call.function.name, call.function.arguments) for call in calls]
        assert [(name, arguments) for _, name, arguments in said["calls"].values()] == whole
        ids = [call.id for call in calls] + [call[0] for call in said["calls"].values()]
        if form == "kimi_k2":  # whose template writes the ids that the model gave
            assert ids == ["functions.weather:0", "functions.weather:1"] * 2
            return
        assert len(set(ids)) == 4
        pattern = "[0-9A-Za-z]{9}" if form == "mistral" else "call_[0-9a-f]{24}"
        assert all(re.fullmatch(pattern, each) for each in ids)


async def test_arguments_are_streamed_as_they_come(memory_bus: MemoryBus) -> None:
    async with speaking(memory_bus, written("hermes", [PARIS]), Dialect("hermes")) as stack:
        parts = [
            call.function.arguments
            async for chunk in await ask(stack, tools=TOOLS, stream=True)
            for call in chunk.choices[0].delta.tool_calls or []
        ]
    assert len(parts) > 5
    assert "".join(parts) == json.dumps(PARIS.arguments, ensure_ascii=False)


async def test_the_sdks_own_accumulator_understands_the_stream(memory_bus: MemoryBus) -> None:
    async with (
        speaking(memory_bus, written("hermes", [PARIS, ROME]), Dialect("hermes")) as stack,
        stack.openai.chat.completions.stream(model=MODEL, messages=HELLO, tools=TOOLS) as stream,
    ):
        message = (await stream.get_final_completion()).choices[0].message
    assert [json.loads(call.function.arguments) for call in message.tool_calls or []] == [
        PARIS.arguments,
        ROME.arguments,
    ]


DIGITS = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+"}}
CUSTOM: Any = [*TOOLS, {"type": "custom", "custom": {"name": "shell", "description": "Runs it.", "format": DIGITS}}]
SHELL: Any = {"type": "custom", "custom": {"name": "shell"}}


async def test_custom_tools_are_given_a_text(memory_bus: MemoryBus) -> None:
    typed = 'echo "é"\n'
    text = written("hermes", [Call("shell", {"input": typed}), PARIS, Call("shell", {"text": "ls"})])
    async with speaking(memory_bus, text, Dialect("hermes")) as stack:
        message = (await ask(stack, tools=CUSTOM)).choices[0].message
        shell, weather, other = message.tool_calls
        assert (shell.type, shell.custom.name, shell.custom.input) == ("custom", "shell", typed)
        assert (weather.type, json.loads(weather.function.arguments)) == ("function", PARIS.arguments)
        assert json.loads(other.custom.input) == {"text": "ls"}, "what the model wrote is not lost"
        parts: dict[int, list[Any]] = {0: [], 1: [], 2: []}
        async for chunk in await ask(stack, tools=CUSTOM, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                parts[call.index].append(call.to_dict())
        assert {(part.get("type"), part["custom"].get("name")) for part in parts[0]} == {
            ("custom", "shell"),
            (None, None),
        }
        assert "".join(part["custom"]["input"] for part in parts[0]) == typed
        assert "".join(part["function"]["arguments"] for part in parts[1]) == weather.function.arguments
        assert "".join(part["custom"]["input"] for part in parts[2]) == other.custom.input
        result: Any = {"role": "tool", "tool_call_id": shell.id, "content": "é"}
        allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [SHELL]}}
        history = [*HELLO, message.model_dump(exclude_none=True), result]
        for choice in (SHELL, allowed):
            await stack.openai.chat.completions.create(model=MODEL, messages=history, tools=CUSTOM, tool_choice=choice)
            asked = dispatched(stack)[-1]
            assert isinstance(asked.prompt, ChatPrompt)
            called, *_ = json.loads(asked.prompt.messages)[1]["tool_calls"]
            assert (called["type"], json.loads(called["function"]["arguments"])) == ("function", {"input": typed})
            assert "[0-9]+" in asked.grammar.text  # type: ignore[union-attr]
            assert "weather" not in asked.grammar.text  # type: ignore[union-attr]


async def test_every_choice_has_its_own_calls(memory_bus: MemoryBus) -> None:
    async with speaking(memory_bus, written("hermes", [PARIS]), Dialect("hermes")) as stack:
        answer = await ask(stack, tools=TOOLS, n=2, logprobs=True)
        assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 2
        length = len(tokens(written("hermes", [PARIS])))
        assert [len(choice.logprobs.content) for choice in answer.choices] == [length, length]
        assert answer.usage.completion_tokens == 2 * length
        said = await streamed(stack, tools=TOOLS, n=2, logprobs=True)
        assert [len(each["calls"]) for each in said] == [1, 1]
        assert [each["logprobs"] for each in said] == [length, length]


async def test_one_call_at_the_most_where_they_may_not_be_parallel(memory_bus: MemoryBus) -> None:
    async with speaking(memory_bus, written("hermes", [PARIS, ROME]), Dialect("hermes")) as stack:
        answer = await ask(stack, tools=TOOLS, parallel_tool_calls=False)
        assert [json.loads(c.function.arguments) for c in answer.choices[0].message.tool_calls] == [PARIS.arguments]
        (said,) = await streamed(stack, tools=TOOLS, parallel_tool_calls=False)
        assert len(said["calls"]) == 1


MALFORMED = '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>'


async def test_what_is_no_call_is_content_unchanged(memory_bus: MemoryBus) -> None:
    async with speaking(memory_bus, f"Look: {MALFORMED}", Dialect("hermes")) as stack:
        choice = (await ask(stack, tools=TOOLS)).choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert choice.message.content == f"Look: {MALFORMED}"
        (said,) = await streamed(stack, tools=TOOLS)
        assert (said["content"], said["finish"]) == (f"Look: {MALFORMED}", "stop")


async def test_a_call_that_the_length_cuts_off_is_told_as_far_as_it_came(memory_bus: MemoryBus) -> None:
    async with speaking(memory_bus, written("hermes", [PARIS]), Dialect("hermes")) as stack:
        choice = (await ask(stack, tools=TOOLS, max_tokens=20)).choices[0]
        assert choice.finish_reason == "length"
        assert json.dumps(PARIS.arguments).startswith(choice.message.tool_calls[0].function.arguments)
        (said,) = await streamed(stack, tools=TOOLS, max_tokens=20)
        assert (said["finish"], said["content"]) == ("length", "")
        assert said["calls"][0][2] == choice.message.tool_calls[0].function.arguments


async def test_a_lost_engine_in_the_middle_of_a_call_is_not_noticed(memory_bus: MemoryBus) -> None:
    async with speaking(memory_bus, written("hermes", [PARIS]), Dialect("hermes")) as stack:
        messages: Any = [{"role": "user", "content": "FAIL once"}]
        stream = await stack.openai.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, stream=True)
        said: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "logprobs": 0}
        async for chunk in stream:
            _gather(said, chunk.choices[0])
        assert json.loads(said["calls"][0][2]) == PARIS.arguments
        assert {message.attempt for message in dispatched(stack)} == {1, 2}


def dispatched(stack: GatewayStack) -> list[Tokenize]:
    return [message for message in stack.ring.seen if isinstance(message, Tokenize)]


async def test_thoughts_come_before_the_answer_and_its_calls(memory_bus: MemoryBus) -> None:
    text = "<think>\nParis? Or\nRome.\n</think>\n\nI look.\n" + written("hermes", [PARIS])
    async with speaking(memory_bus, text, Dialect("hermes", "qwen3")) as stack:
        message = (await ask(stack, tools=TOOLS)).choices[0].message
        assert message.reasoning_content == message.reasoning == "Paris? Or\nRome."
        assert (message.content, len(message.tool_calls)) == ("I look.", 1)
        (said,) = await streamed(stack, tools=TOOLS)
        assert (said["reasoning"], said["content"]) == ("Paris? Or\nRome.", "I look.")
        assert len(said["calls"]) == 1
        (said,) = await streamed(stack, tools=TOOLS, extra_body={"include_reasoning": False})
        assert (said["reasoning"], said["content"]) == ("", "I look.")
        shown, hidden = [
            (await ask(stack, tools=TOOLS, extra_body={"include_reasoning": include})).usage
            for include in (True, False)
        ]
        assert 0 < hidden.completion_tokens_details.reasoning_tokens < hidden.completion_tokens
        assert hidden.completion_tokens_details == shown.completion_tokens_details


@pytest.mark.parametrize(
    ("thinking", "reasoning", "content"),
    [("open", "so", "Yes."), ("closed", None, "so</think>Yes."), (None, None, "so</think>Yes.")],
)
async def test_where_thoughts_begin_is_seen_in_the_prompt(
    memory_bus: MemoryBus, thinking: Thinking | None, reasoning: str | None, content: str
) -> None:
    async with speaking(memory_bus, "so</think>Yes.", Dialect(None, "qwen3"), thinking) as stack:
        message = (await ask(stack)).choices[0].message
        assert (message.reasoning_content, message.content) == (reasoning, content)


async def test_channels_reach_clients_apart(memory_bus: MemoryBus) -> None:
    arguments = json.dumps(PARIS.arguments)
    text = (
        "<|channel|>analysis<|message|>Paris?<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{arguments}"
    )
    async with speaking(memory_bus, text, Dialect("openai", "openai_gptoss")) as stack:
        choice = (await ask(stack, tools=TOOLS)).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        assert choice.message.reasoning == "Paris?"
        assert [call.function.arguments for call in choice.message.tool_calls] == [arguments]
        (said,) = await streamed(stack, tools=TOOLS)
        assert (said["content"], said["reasoning"], said["finish"]) == ("I look.", "Paris?", "tool_calls")
        assert [call[2] for call in said["calls"].values()] == [arguments]
        await ask(stack, tools=TOOLS, tool_choice="required")
        *free, forced = dispatched(stack)
        assert not any(message.skip_special_tokens for message in (*free, forced))
        assert forced.grammar is not None
        assert (forced.grammar.kind, forced.grammar.after) == ("structural_tag", "")


async def test_a_gateway_that_was_told_a_format_does_not_ask_the_model(memory_bus: MemoryBus) -> None:
    text = f"thoughts</think>{written('mistral', [PARIS])}"
    async with speaking(
        memory_bus, text, Dialect("hermes"), tool_call_parser="mistral", reasoning_parser="deepseek_r1"
    ) as stack:
        message = (await ask(stack, tools=TOOLS)).choices[0].message
        assert (message.reasoning, len(message.tool_calls)) == ("thoughts", 1)


async def test_a_gateway_that_parses_nothing_passes_all_on(memory_bus: MemoryBus) -> None:
    text = "<think>x</think>" + written("hermes", [PARIS])
    async with speaking(
        memory_bus, text, Dialect("hermes", "qwen3"), tool_call_parser="none", reasoning_parser="none"
    ) as stack:
        message = (await ask(stack, tools=TOOLS)).choices[0].message
        assert (message.content, message.tool_calls) == (text, None)
        assert not dispatched(stack)[-1].keep_markup


async def test_what_the_ring_is_told_of_tools(memory_bus: MemoryBus) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    async with speaking(memory_bus, "hi", Dialect("hermes", "qwen3")) as stack:
        for choice in ("auto", "none", "required", named):
            await ask(stack, tools=TOOLS, tool_choice=choice)
        auto, none, required, forced = dispatched(stack)
        assert [m.prompt.tools is None for m in (auto, none, required)] == [False, True, False]  # type: ignore[union-attr]
        assert auto.grammar is None
        assert none.grammar is None
        assert all(m.grammar is not None and m.grammar.kind == "structural_tag" for m in (required, forced))
        assert required.grammar is not None
        assert required.grammar.after == required.thinking_end == "</think>"
        assert all(message.keep_markup for message in (auto, none, required, forced))
        strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
        await ask(stack, tools=strict)
        grammar = dispatched(stack)[-1].grammar
        assert grammar is not None
        assert json.loads(grammar.text)["format"]["triggers"] == ["<tool_call>"]


async def test_a_tools_answer_goes_back_as_it_came(memory_bus: MemoryBus) -> None:
    async with speaking(memory_bus, written("hermes", [PARIS]), Dialect("hermes")) as stack:
        message = (await ask(stack, tools=TOOLS)).choices[0].message
        history: Any = [
            *HELLO,
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"sky": "blue"}'},
        ]
        await stack.openai.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
        prompt = dispatched(stack)[-1].prompt
        assert isinstance(prompt, ChatPrompt)
        assert json.loads(prompt.messages)[1:] == history[1:]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [3]}}},
            "tool_choice.allowed_tools.tools",
        ),
        ({"tools": [*TOOLS, *TOOLS]}, "tools[1].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": SHELL}, "tool_choice"),
        ({"tools": CUSTOM, "tool_choice": {"type": "custom", "custom": {"name": "weather"}}}, "tool_choice"),
        ({"tools": [SHELL, SHELL]}, "tools[1].custom.name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, None),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "extra_body": {"structured_outputs": {"regex": "a"}}},
            "structured_outputs.regex",
        ),
    ],
    ids=repr,
)
async def test_what_clients_may_not_say_of_tools(memory_bus: MemoryBus, fields: Any, param: str | None) -> None:
    async with speaking(memory_bus, "hi", Dialect("hermes")) as stack:
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(stack, **fields)
        assert refused.value.param == (param or "tools[0].function.parameters")
        assert not dispatched(stack)


async def test_calls_of_different_requests_have_different_ids(memory_bus: MemoryBus) -> None:
    async with speaking(memory_bus, written("hermes", [PARIS]), Dialect("hermes")) as stack:
        answers = await asyncio.gather(*(streamed(stack, tools=TOOLS) for _ in range(8)))
        assert len({said["calls"][0][0] for (said,) in answers}) == 8
