"""Outputs as models write them, well and badly, and what clients get of them."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.api.chat import AssistantMessage
from services.gateway.parsing.dialects.parameter_values import converted, parameter_schema, value_types
from services.gateway.parsing.events import ContentText, ToolCallArguments, ToolCallRetraction, ToolCallStart
from services.gateway.parsing.json_calls import MAX_DEPTH
from services.gateway.parsing.output_dialect import OutputDialect
from services.gateway.parsing.output_parser import OutputParser, ParserOptions
from shared.messages.dialects import ReasoningFormat, Thinking, ToolFormat
from tests.support.gateway.tool_calls import Read, read

SCHEMAS = {"f": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": "object"}}}, "g": {}}
F1 = ("f", '{"a": 1}')

READ: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    # hermes
    ("hermes", '<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>', "", [F1]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a": 1},"why":["x",{}]}</tool_call>', "", [F1]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}', "", [F1]),
    ("hermes", 'A\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\nB', "A\nB", [F1]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n \n', "", [F1]),
    ("hermes", '<tool_call>{"name": "x\\ny", "arguments": {}}</tool_call>', "", [("x\ny", "{}")]),
    ("hermes", '<tool_call><function=f><parameter=a>1</parameter></function></tool_call>', "", [F1]),
    ("hermes", '{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "arguments": {"a": 1}}', []),
    ("hermes", "a < b </tool_call> <tool", "a < b </tool_call> <tool", []),
    # llama3_json
    ("llama3_json", '  {"name": "f", "parameters": {"a": 1}}', "", [F1]),
    ("llama3_json", 'So:\n{"type": "function", "name": "f", "parameters": {"a": 1}}', "So:", [F1]),
    ("llama3_json", '<|python_tag|>{"name": "unknown", "parameters": {}}', "", [("unknown", "{}")]),
    ("llama3_json", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("llama3_json", '{"name": "f", "age": 3}', '{"name": "f", "age": 3}', []),
    ("llama3_json", 'see {"name": "f", "parameters": {}}', 'see {"name": "f", "parameters": {}}', []),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}} ; ok', " ; ok", [F1]),
    # mistral
    ("mistral", '[TOOL_CALLS] {"name": "f", "arguments": {"a": 1}}', "", [F1]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}', "", [F1]),
    ("mistral", 'Hm.[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "x"}', "Hm.", [F1]),
    ("mistral", "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    # qwen3_xml
    ("qwen3_xml", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", "", [F1]),
    ("qwen3_xml", "<tool_call><function=f><parameter=a>1<parameter=s>x</function></tool_call>", "",
     [("f", '{"a": 1, "s": "x"}')]),
    ("qwen3_xml", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F1]),
    ("qwen3_xml", "<function=f><parameter=s>\n\n two\nlines \n\n</parameter></function>", "",
     [("f", '{"s": "\\n two\\nlines \\n"}')]),
    ("qwen3_xml", "<function=f><parameter=a>many</parameter></function>", "", [("f", '{"a": "many"}')]),
    ("qwen3_xml", "<function=f><parameter=o>{'k': True}</parameter></function>", "", [("f", '{"o": {"k": true}}')]),
    ("qwen3_xml", '<function=f><parameter=new>"5" <b></parameter></function>', "", [("f", '{"new": "\\"5\\" <b>"}')]),
    ("qwen3_xml", "<function=g></function>", "", [("g", "{}")]),
    # pythonic
    ("pythonic", "[f(a=1), g()]", "", [F1, ("g", "{}")]),
    ("pythonic", "<|python_start|>[f(a=1)]<|python_end|>", "", [F1]),
    ("pythonic", "[f(s='it\\'s \\x41\\u00e9\\n', o={'k': (1, 2.5,), 'n': None})]", "",
     [("f", '{"s": "it\'s Aé\\n", "o": {"k": [1, 2.5], "n": null}}')]),
    ("pythonic", '[f(s="""two\n"lines\\"""", a=-0x10)]', "", [("f", '{"s": "two\\n\\"lines\\"", "a": -16}')]),
    ("pythonic", "See:\n[f(a=1)]", "See:", [F1]),
    ("pythonic", "[1, 2] and [f] and x[f(1)]", "[1, 2] and [f] and x[f(1)]", []),
    ("pythonic", "[h(a=1)]", "[h(a=1)]", []),
]  # fmt: skip

UNREADABLE: list[tuple[ToolFormat, str]] = [
    ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}} and more</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * MAX_DEPTH + "1"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1'),
    ("llama3_json", '{"name": "f", "parameters": {"a": tru}}'),
    ("llama3_json", "<|python_tag|>brave_search.call(query='x')"),
    ("mistral", '[TOOL_CALLS]f{"a": }'),
    ("qwen3_xml", "<tool_call>\n<function=>\n</function></tool_call>"),
    ("qwen3_xml", "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>"),
    ("qwen3_xml", "<function=f> text </function>"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=1, a=2)]"),
    ("pythonic", "[f(a=b)]"),
    ("pythonic", "[f(s='open"),
    ("pythonic", "[f(s=f'x')]"),
    ("pythonic", "[f(a=inf)]"),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), READ)
def test_calls_are_found(form: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read([text], form, SCHEMAS) == Read(content, "", calls)


@pytest.mark.parametrize(("form", "text"), UNREADABLE)
def test_what_cannot_be_read_stays_as_it_is(form: ToolFormat, text: str) -> None:
    got = read([text], form, SCHEMAS)
    assert (got.content, got.calls) == (text, [])


def test_a_whole_call_stays_one_whatever_comes_behind_it() -> None:
    text = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": 5}]'
    assert read([text], "mistral") == Read(', {"name": 5}]', "", [F1])


def test_only_a_cut_leaves_an_open_call_standing() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "Par'
    assert read([text], "hermes", truncated=True) == Read("", "", [("f", '{"a": "Par')])
    assert read([text], "hermes", truncated=False) == Read(text, "", [], broken=1)
    begun = '<tool_call>{"name": "f", "argu'
    assert read([begun], "hermes", truncated=True) == Read(begun, "", [])


def test_a_stream_tells_all_it_may_and_no_more() -> None:
    parser = OutputParser(ParserOptions(OutputDialect("hermes")))
    assert parser.feed("Look: ") == [ContentText("Look:")]
    assert parser.feed("a <tool") == [ContentText(" a")]
    assert parser.feed('_call>{"name": "f", "arg') == []
    assert parser.feed('uments": {"a": "x') == [ToolCallStart("f"), ToolCallArguments('{"a": "x')]
    assert parser.feed("yz") == [ToolCallArguments("yz")]
    assert parser.feed("\n") == [ToolCallRetraction(), ContentText(' <tool_call>{"name": "f", "arguments": {"a": "xyz')]
    assert parser.finish(truncated=False) == [ContentText("\n")]


def test_a_broken_call_leaves_its_index_behind() -> None:
    speech = AssistantMessage(ParserOptions(OutputDialect("hermes")), iter("abc").__next__)
    first = speech.feed('<tool_call>{"name": "f", "arguments": {"a": ?}}</tool_call>', None)
    assert [entry["index"] for entry in first["tool_calls"]] == [0]
    second = speech.feed('<tool_call>{"name": "g", "arguments": {}}</tool_call>', "stop")
    assert [(entry["index"], entry["id"]) for entry in second["tool_calls"]] == [(1, "b")]
    assert speech.finish_reason("stop") == "tool_calls"
    assert [call["id"] for call in speech.body()["tool_calls"]] == ["b"]


def test_white_space_is_kept_where_the_output_goes_on_with_an_answer() -> None:
    """Found beside vLLM: "Sure" was gone on with as "busy" where the model had said " busy"."""
    parser = OutputParser(ParserOptions(OutputDialect("hermes", "qwen3"), continued=True))
    parser.thinking = "closed"
    assert parser.feed(" busy") == [ContentText(" busy")]


THOUGHTS: list[tuple[ReasoningFormat, Thinking | None, str, str, str]] = [
    ("qwen3", None, "<think>\nso\n</think>\n\nYes", "so", "Yes"),
    ("qwen3", None, "\n<think></think>Yes", "", "Yes"),
    ("qwen3", None, "  Yes <think>no</think>", "", "  Yes <think>no</think>"),
    ("qwen3", "open", "so\n</think>\nYes", "so", "Yes"),
    ("qwen3", "open", "<think>so</think>Yes", "so", "Yes"),
    ("qwen3", "closed", "\n\nYes", "", "Yes"),
    ("qwen3", None, "<think>so it", "so it", ""),
    ("deepseek_r1", None, "so</think>Yes", "so", "Yes"),
    ("deepseek_r1", None, "<think>so</think>Yes", "so", "Yes"),
    ("deepseek_r1", None, "so it goes", "so it goes", ""),
    ("deepseek_r1", "closed", "Yes", "", "Yes"),
    ("mistral", None, "[THINK]so[/THINK]Yes", "so", "Yes"),
]


@pytest.mark.parametrize(("form", "thinking", "text", "reasoning", "content"), THOUGHTS)
def test_thoughts_are_told_apart(
    form: ReasoningFormat, thinking: Thinking | None, text: str, reasoning: str, content: str
) -> None:
    assert read([text], None, reasoning=form, thinking=thinking) == Read(content, reasoning, [])
    assert read(list(text), None, reasoning=form, thinking=thinking) == Read(content, reasoning, [])


def test_calls_within_thoughts_are_thoughts() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    got = read([f"<think>{call}?</think>\n{call}"], "hermes", reasoning="qwen3")
    assert got == Read("", f"{call}?", [F1])


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null", 5]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "array"}]}]}, {"string", "array"}),
        ({"$ref": "#/$defs/number"}, {"number"}),
        ({"$ref": "#/$defs/self"}, {"any"}),
        ({"$ref": "elsewhere"}, set()),
        ({}, set()),
        (None, set()),
        (True, set()),
    ],
)
def test_a_parameters_types_are_those_that_its_schema_names(schema: Any, types: set[str]) -> None:
    definitions = {"number": {"type": "number"}, "self": {"$ref": "#/$defs/self"}}
    assert value_types(parameter_schema({"properties": {"a": schema}, "$defs": definitions}, "a")) == types
    assert parameter_schema(None, "a") == parameter_schema({"properties": []}, "a") == {}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": ["string", "integer"]}, "5"),
        ("5", {"type": ["string", "boolean"]}, '"5"'),
        ("null", {"type": ["string", "null"]}, "null"),
        ("null", {"type": "string"}, '"null"'),
        (" [1, 'a'] ", {"type": "array"}, '[1, "a"]'),
        ('{"a":1}', {"type": "object"}, '{"a":1}'),
        ("NaN", {"type": "number"}, '"NaN"'),
        ("True", {"type": "boolean"}, "true"),
        ('say "hi"', {"items": {}}, '"say \\"hi\\""'),
        ("hall ", {"enum": ["kitchen", "hall"]}, '"hall"'),
        ("\nnull\n", {"enum": ["null ", None]}, '"null "'),
        ("5", {"enum": ["x", 5]}, "5"),
        ("other", {"enum": ["x", 5]}, '"other"'),
        ("\nabc ", {"type": "string", "maxLength": 3}, '"abc"'),
        (" ", {"type": "string", "maxLength": 3}, '""'),
    ],
)
def test_a_value_means_what_its_schema_says(text: str, schema: dict[str, Any], value: str) -> None:
    assert converted(text, schema) == value


def test_what_no_json_can_hold_is_no_call() -> None:
    for number in ("9" * 400, "0x" + "f" * 9000, "1e999", "9" * 9000, "1j", "nan"):
        read([f"[f(a={number})]"], "pythonic", SCHEMAS)
    assert read(["[f(a=1e999)]"], "pythonic", SCHEMAS).calls == []
    assert read(['<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'], "hermes").calls == []
    assert read(["[f(s='\\ud83d\\ude00')]"], "pythonic", SCHEMAS).calls == [("f", '{"s": "\\ud83d\\ude00"}')]
