"""Parsers that installed packages bring: the example in docs/examples/bracket-parsers, and some that misbehave."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from services.gateway.api.tool_grammars import combined_grammar
from services.gateway.api.tools import ToolDefinition, ToolOptions
from services.gateway.config import GatewayConfig
from services.gateway.parsing.parser_choice import ParserChoice
from shared.bus.memory_bus import MemoryBus
from shared.messages.dialects import Dialect
from tests.support.gateway.fake_services import MODEL, FakeRing
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack
from tests.support.plugin_packages import EXAMPLES, pip_installed, written_package

HELLO: Any = [{"role": "user", "content": "what is the weather"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
CHOSEN = {"tool_call_parser": "brackets", "reasoning_parser": "asides"}
MISBEHAVING = """
from services.gateway.parsing.interface import *

class Raising(ToolParser):
    openings = CallOpenings(anywhere=("[[",))
    def read(self, cursor, events):
        yield from cursor.expect("[[")
        raise KeyError("a bug")

class Idle(Raising):
    def read(self, cursor, events):
        return
        yield

class Refusing(Raising):
    def read(self, cursor, events):
        raise NotAToolCall
        yield

class Waiting(Raising):
    def read(self, cursor, events):
        while True:
            yield

class Unordered(Raising):
    def read(self, cursor, events):
        yield from cursor.expect("[[")
        events.arguments("{}")

class Open(Raising):
    def read(self, cursor, events):
        yield from cursor.expect("[[")
        events.start_call("f")

class Opening(ToolParser):
    openings = CallOpenings()

class Template(Raising):
    call_template = "[[{name}]]"

class RaisingThoughts(ReasoningParser):
    marks = ThinkingMarks("((", "))")
    def read(self, cursor, events, thinking):
        yield from cursor.peek()
        raise RuntimeError("a bug")

class Unmarked(ReasoningParser):
    pass
"""
TOOL_NAMES = ("Raising", "Idle", "Refusing", "Waiting", "Unordered", "Open", "Opening", "Template")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pip_installed("bracket-parsers", tmp_path_factory)


@pytest.fixture
def _brackets(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(example))


@pytest.fixture
def _misbehaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = {name.lower(): f"misbehaving_parsers:{name}" for name in TOOL_NAMES}
    tools |= {"missing": "no_such_module:Parser", "json": "json:loads", "twice": "misbehaving_parsers:Raising"}
    thoughts = {"raisingthoughts": "misbehaving_parsers:RaisingThoughts", "unmarked": "misbehaving_parsers:Unmarked"}
    groups = {"baton.tool_parsers": tools, "baton.reasoning_parsers": thoughts}
    folder = written_package(tmp_path, "misbehaving_parsers", MISBEHAVING, groups)
    written_package(tmp_path, "other_parsers", "", {"baton.tool_parsers": {"twice": "json:loads"}})
    monkeypatch.syspath_prepend(str(folder))


def stack_saying(bus: MemoryBus, tokens: list[str], **settings: Any) -> Any:
    ring = FakeRing(bus)
    ring.script, ring.dialect = tokens, Dialect("hermes", "qwen3")
    return gateway_stack(bus, ring=ring, **settings)


async def ask(stack: GatewayStack, **fields: Any) -> Any:
    return await stack.openai.chat.completions.create(model=MODEL, messages=HELLO, **fields)


def test_the_example_is_short() -> None:
    lines = (EXAMPLES / "bracket-parsers" / "bracket_parsers.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 60


@pytest.mark.usefixtures("_brackets")
async def test_an_installed_package_reads_calls_and_reasoning(memory_bus: MemoryBus) -> None:
    tokens = ["((", "it may", " rain))", "Let me look. [", '[weather {"ci', 'ty": "Rome"}', "]", "] Then [[x", "]]"]
    async with stack_saying(memory_bus, tokens, **CHOSEN) as stack:
        message = (await ask(stack, tools=TOOLS)).choices[0].message
        assert (message.reasoning, message.content) == ("it may rain", "Let me look.  Then [[x]]".replace("  ", " "))
        assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [
            ("weather", '{"city": "Rome"}')
        ]
        pieces = [
            chunk.choices[0].delta.tool_calls[0].function.arguments
            async for chunk in await ask(stack, tools=TOOLS, stream=True)
            if chunk.choices and chunk.choices[0].delta.tool_calls
        ]
        assert len([piece for piece in pieces if piece]) > 1, "as they arrive"
        assert "".join(pieces) == '{"city": "Rome"}'
        large: Any = [*TOOLS, *({"type": "function", "function": {"name": f"f{i}"}} for i in range(200))]
        padded: Any = [{"role": "user", "content": "x" * 300_000}]
        beside = await stack.openai.chat.completions.create(model=MODEL, messages=padded, tools=large)
        assert beside.choices[0].message.tool_calls[0].function.name == "weather", "read in a process of its own"


@pytest.mark.usefixtures("_brackets")
def test_calls_are_forced_as_the_package_writes_them() -> None:
    tools = (ToolDefinition("weather", SCHEMA, strict=True),)
    dialect = ParserChoice("brackets", "none").dialect(Dialect("hermes", "qwen3"))
    forced = combined_grammar(dialect, ToolOptions(tools, "required", True, "tool_choice"), None)
    assert forced is not None
    (tag,) = json.loads(forced.grammar.text)["format"]["tags"]
    assert (tag["begin"], tag["content"]["json_schema"], tag["end"]) == ("[[weather ", SCHEMA, "]]")
    strict = combined_grammar(dialect, ToolOptions(tools, "auto", True, "tools"), None)
    assert strict is not None
    assert json.loads(strict.grammar.text)["format"]["triggers"] == ["[["]
    thinking = ParserChoice("brackets", "asides").dialect(Dialect())
    either = combined_grammar(thinking, ToolOptions(tools, "required", True, "tool_choice"), None)
    assert either is not None
    assert "((" in json.dumps(json.loads(either.grammar.text)["format"]["elements"][1])


BUG = "the tool parser raising failed: KeyError('a bug')"


@pytest.mark.usefixtures("_misbehaving")
@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tool_call_parser": "raising"}, BUG),
        ({"tool_call_parser": "idle"}, "it has read nothing"),
        ({"tool_call_parser": "waiting"}, "it waits for text behind the output's end"),
        ({"tool_call_parser": "unordered"}, "ValueError('no call is open')"),
        ({"tool_call_parser": "open"}, "it has not ended its call"),
        ({"reasoning_parser": "raisingthoughts"}, "the reasoning parser raisingthoughts failed: RuntimeError"),
    ],
)
async def test_a_parser_that_fails_fails_its_request_only(
    memory_bus: MemoryBus, settings: dict[str, str], why: str
) -> None:
    async with stack_saying(memory_bus, ["a", " [[", "b", " c"], **settings) as stack:
        other = asyncio.create_task(stack.openai.completions.create(model=MODEL, prompt="x"))
        with pytest.raises(openai.InternalServerError, match="parser") as failed:
            await ask(stack, tools=TOOLS)
        assert why in str(failed.value)
        with pytest.raises(openai.APIError) as broken_off:
            async for _ in await ask(stack, tools=TOOLS, stream=True):
                pass
        assert why in str(broken_off.value)
        assert (await other).choices[0].text == "a [[b c"
        async with asyncio.timeout(60):
            while not stack.gateway.is_idle():
                await asyncio.sleep(0.01)


@pytest.mark.usefixtures("_misbehaving")
async def test_what_a_parser_takes_for_no_call_is_text(memory_bus: MemoryBus) -> None:
    async with stack_saying(memory_bus, ["a", " [[", "[[ b"], tool_call_parser="refusing") as stack:
        assert (await ask(stack, tools=TOOLS)).choices[0].message.content == "a [[[[ b"


@pytest.mark.usefixtures("_misbehaving")
@pytest.mark.parametrize(
    ("setting", "name", "why"),
    [
        ("tool_call_parser", "hermess", "no installed package brings it; there are: auto, none, hermes, llama3_json"),
        ("tool_call_parser", "missing", "misbehaving-parsers 1.0 (missing = no_such_module:Parser): ModuleNotFound"),
        ("tool_call_parser", "json", "misbehaving-parsers 1.0 (json = json:loads): a subclass of ToolParser is"),
        ("tool_call_parser", "opening", "(opening = misbehaving_parsers:Opening): openings: CallOpenings with one"),
        ("tool_call_parser", "template", "call_template = '[[{name}]]': BEGIN{name}MIDDLE{arguments}END is expected"),
        ("tool_call_parser", "twice", "several packages bring it: misbehaving-parsers 1.0 (twice = misbehaving_par"),
        ("reasoning_parser", "unmarked", "misbehaving-parsers 1.0 (unmarked = misbehaving_parsers:Unmarked): marks"),
        ("reasoning_parser", "raising", "no installed package brings it; there are: auto, none, deepseek_r1, qwen3"),
    ],
)
def test_what_cannot_be_used_is_refused_at_the_start(setting: str, name: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"{setting} = {name}") as refused:
        GatewayConfig(instance="g", **{setting: name})  # type: ignore[arg-type]
    assert why in str(refused.value)
