"""What parsing an output promises, whatever the model wrote and however it is cut into deltas."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.api.chat import AssistantMessage
from services.gateway.parsing.dialects.pythonic import python_as_json
from services.gateway.parsing.json_calls import read_value
from services.gateway.parsing.output_dialect import OutputDialect
from services.gateway.parsing.output_parser import ParserOptions
from services.gateway.parsing.text_cursor import NotAToolCall, TextCursor
from shared.messages.dialects import ReasoningFormat, ToolFormat
from tests.support.gateway.tool_calls import (
    FORMS,
    FRAMED,
    STYLES,
    WITHOUT_JSON,
    Call,
    Read,
    cut_at,
    read,
    schema_of,
    written,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>"), max_size=12)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False, allow_infinity=False), TEXT
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
CALLS = st.lists(st.builds(Call, NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3)
PLACES = st.lists(st.integers(0, 10_000), max_size=12)


@pytest.mark.parametrize(("form", "style"), STYLES)
@settings(max_examples=12, deadline=None)
@given(calls=CALLS, before=st.sampled_from(["", "Let me look.\n", "Grüße 🎉\n\n"]), places=PLACES)
def test_calls_are_read_as_they_were_written(
    form: ToolFormat, style: str, calls: list[Call], before: str, places: list[int]
) -> None:
    calls = list({call.name: call for call in calls}.values())
    schemas = {call.name: schema_of(call) for call in calls}
    if form in FRAMED:  # a text's own line break at either end could not be told from the frame's
        calls = [Call(name, {k: _framed(v) for k, v in arguments.items()}) for name, arguments in calls]
    got = read(cut_at(before + written(form, calls, style), places), form, schemas)
    assert got.content == before.rstrip()
    assert got.broken == 0
    assert [Call(name, json.loads(arguments)) for name, arguments in got.calls] == calls
    if form not in WITHOUT_JSON:
        assert [text for _, text in got.calls] == [json.dumps(c.arguments, ensure_ascii=False) for c in calls]


def _framed(value: Any) -> Any:
    return f"x{value}y" if isinstance(value, str) else value


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool", "_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[TOOL"),
        *("<function=f>", "</function>", "<parameter=a>", "</parameter>", "<think>", "</think>", "[f(", "[f(a=1)]"),
        *('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {}}', '{"name":', '"f"', ", ", ": "),
        *("{", "}", "[", "]", "(", ")", "=", '"', "'", "\\", "a", "f", "1", "-", "true", "None", "\n", " ", ";", "é"),
        *("\\ud800", "\\u", "\\x4", "9" * 400, "0x", "1e999", "nan", '"""', "\t", "\0", "{'a': ", '"s": ', "s="),
        *("<parameter=s>", "<parameter=n>", '{"name": "\\udfff", "arguments": {}}', "[f(n="),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "f<｜tool▁sep｜>",
            "\n```json\n",
            "```",
            "<｜tool▁call▁end｜>",
        ),
        *(
            "<|tool_call|>",
            "[",
            '[{"name": "f", "arguments": {}}',
            "Here is my thought process:",
            "Here's my response:",
        ),
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.f:0", "<|tool_call_argument_begin|>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>"),
        *("<minimax:tool_call>", '<invoke name="f">', '<parameter name="s">', "</invoke>", "</minimax:tool_call>"),
        *("<tool_calls>", "</tool_calls>", "<|start|>assistant", "<|channel|>analysis", "<|channel|>commentary"),
        *(" to=functions.f", " <|constrain|>json", "<|message|>", "<|end|>", "<|call|>"),
    ]
)
OUTPUTS = st.lists(FRAGMENTS, max_size=14).map("".join)
SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "s": {"type": "string", "maxLength": 3},
            "n": {"enum": ["f", 1, None]},
        },
    }
}


@pytest.mark.parametrize("form", [None, "openai", *FORMS])
@settings(max_examples=25, deadline=None)
@given(
    text=OUTPUTS,
    places=PLACES,
    reasoning=st.sampled_from([None, *get_args(ReasoningFormat)]),
    thinking=st.sampled_from([None, "open", "closed"]),
    truncated=st.booleans(),
)
def test_any_cut_into_deltas_gives_the_same(
    form: ToolFormat | None,
    text: str,
    places: list[int],
    reasoning: ReasoningFormat | None,
    thinking: Any,
    truncated: bool,
) -> None:
    how: dict[str, Any] = {"reasoning": reasoning, "thinking": thinking, "truncated": truncated}
    whole = read([text], form, SCHEMAS, **how)
    assert read(cut_at(text, places), form, SCHEMAS, **how) == whole
    assert read(list(text), form, SCHEMAS, **how) == whole


@pytest.mark.parametrize("form", [None, "openai", *FORMS])
@settings(max_examples=25, deadline=None)
@given(
    text=OUTPUTS, places=PLACES, reasoning=st.sampled_from([None, "qwen3"]), finish=st.sampled_from(["stop", "length"])
)
def test_whatever_a_model_writes_can_be_told(
    form: ToolFormat | None, text: str, places: list[int], reasoning: ReasoningFormat | None, finish: Any
) -> None:
    speech = AssistantMessage(ParserOptions(OutputDialect(form, reasoning), SCHEMAS))
    deltas = [speech.feed(part, None) for part in cut_at(text, places)] + [speech.feed("", finish)]
    for delta in deltas:
        msgspec.json.encode(delta)
    message = speech.body()
    assert "".join(delta.get("content", "") for delta in deltas) == (message["content"] or "")
    assert json.loads(msgspec.json.encode(message)) == message
    for call in message.get("tool_calls", []) if finish == "stop" else []:
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


@pytest.mark.parametrize("form", [None, *FORMS])
@settings(max_examples=15, deadline=None)
@given(text=OUTPUTS)
def test_an_output_without_a_whole_call_is_content_unchanged(form: ToolFormat | None, text: str) -> None:
    got = read([text], form, SCHEMAS)
    if not got.calls:
        assert got == Read(text, "", [], got.broken)


@settings(max_examples=100, deadline=None)
@given(VALUES, st.booleans(), PLACES)
def test_json_passes_unchanged(value: Any, ascii_only: bool, places: list[int]) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=1 if ascii_only else None)
    assert _json(cut_at(text, places)) == text


@settings(max_examples=100, deadline=None)
@given(st.one_of(OUTPUTS, st.text('{}[]",:\\u0123e.-+ truefalsn', max_size=14)))
def test_only_json_is_json(text: str) -> None:
    """Python's own reader decides; it takes NaN, too, which none of these texts has."""
    try:
        json.loads(text)
    except ValueError:
        assert _json([text]) is None
    else:
        assert _json([text]) is not None


def _json(parts: list[str]) -> str | None:
    """What of a whole text was passed on as JSON; None where it is none."""
    cursor, got = TextCursor(), list[str]()
    cursor.feed("")
    reading = _whole(cursor, got)
    try:
        for part in parts:
            cursor.feed(part)
            next(reading, None)
        cursor.close(truncated=False)
        next(reading, None)
    except NotAToolCall:
        return None
    return "".join(got).strip()


def _whole(cursor: TextCursor, got: list[str]) -> Any:
    yield from cursor.skip_whitespace()
    yield from read_value(cursor, got.append)
    yield from cursor.skip_whitespace()
    if cursor.unread:
        raise NotAToolCall


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_python_literals_become_json(value: Any) -> None:
    assert json.loads(python_as_json(repr(value))) == value
