"""Grammars that force calls: what they let a model write is what the parsers read, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from services.gateway.api.errors import RequestError
from services.gateway.api.structured_outputs import OutputGrammar
from services.gateway.api.tool_grammars import (
    combined_grammar,
    forced_calls,
    forced_format,
    parser_options,
    triggered_calls,
)
from services.gateway.api.tools import ToolDefinition, ToolOptions
from services.gateway.parsing.output_dialect import OutputDialect
from services.worker.guided.schema.keywords import GrammarRefused
from services.worker.guided.xgrammar_backend import normalize_structural_tag
from shared.messages.dialects import CHANNELS_OF_CALLS, CHANNELS_OF_REASONING, ToolFormat
from shared.messages.generation import Grammar
from shared.models.structural_tags import Format, tagged
from tests.support.gateway.tool_calls import FORMS, STYLES, Call, read, written

SCHEMA = {
    "type": "object",
    "properties": {
        "dry": {"type": "boolean"},
        "city": {"type": "string"},
        "days": {"$ref": "#/$defs/days"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days"],
    "$defs": {"days": {"type": "integer"}},
}
WEATHER = ToolDefinition("weather", SCHEMA, strict=True)
STOP = ToolDefinition("stop", {"type": "object", "properties": {}}, strict=False)
OPTIONAL = ToolDefinition(
    "pick", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}, True
)
TOOLS = (WEATHER, STOP, OPTIONAL)

VALID = [
    [Call("weather", {"city": "Paris", "days": 3})],
    [Call("weather", {"city": "Rome", "days": -1, "tags": ["a", "b"]}), Call("stop", {})],
    [Call("pick", {"a": 1, "b": 2}), Call("pick", {"b": 2}), Call("pick", {"a": 1})],
]
INVALID = [
    Call("weather", {"city": "Paris"}),
    Call("weather", {"city": 5, "days": 3}),
    Call("weather", {"city": "Paris", "days": 3, "more": 1}),
    Call("other", {}),
    Call("stop", {"now": 1}),
]


def accepts(format_: Format, text: str) -> bool:
    grammar = xgrammar.Grammar.from_structural_tag(json.dumps(tagged(format_)))
    return bool(_is_grammar_accept_string(grammar, text))


PYTHON = ("pythonic", "llama4_pythonic")
XML = ("qwen3_xml", "glm45", "minimax_m2")
UNGUIDED = [("llama3_json", "tag"), ("granite", ""), ("granite", "<tool_call>"), *((form, "") for form in PYTHON)]
GUIDED_STYLES = [case for case in STYLES if case not in UNGUIDED]
"""As a grammar made from a JSON schema has them."""


@pytest.mark.parametrize(("form", "style"), GUIDED_STYLES)
def test_a_forced_call_is_one_that_fits(form: ToolFormat, style: str) -> None:
    grammar = forced_calls(form, TOOLS, parallel=True)
    for calls in VALID:
        text = written(form, calls, style)
        assert accepts(grammar, text), text
        got = read([text], form, {tool.name: tool.parameters for tool in TOOLS})
        assert [Call(name, json.loads(arguments)) for name, arguments in got.calls] == calls
    for call in INVALID:
        typed = form in XML and call.arguments.get("city") == 5  # without quotation marks 5 is a text
        assert accepts(grammar, written(form, [call], style)) == typed
    assert not accepts(grammar, "")
    assert not accepts(grammar, "I will not.")


@pytest.mark.parametrize("form", FORMS)
def test_one_call_is_all_where_they_may_not_be_parallel(form: ToolFormat) -> None:
    grammar = forced_calls(form, TOOLS, parallel=False)
    style = next(style for name, style in GUIDED_STYLES if name == form)
    assert accepts(grammar, written(form, VALID[0], style))
    assert not accepts(grammar, written(form, VALID[0] * 2, style))


@pytest.mark.parametrize("form", [form for form in FORMS if form not in PYTHON])
def test_text_may_hold_only_calls_that_fit(form: ToolFormat) -> None:
    style = next(style for name, style in GUIDED_STYLES if name == form)
    grammar = triggered_calls(form, (WEATHER, STOP))
    assert grammar is not None
    assert accepts(grammar, "I do not know.")
    assert accepts(grammar, "Wait.\n" + written(form, VALID[0], style))
    assert accepts(grammar, written(form, [Call("stop", {"now": 1})], style)), "its schema is not strict"
    assert not accepts(grammar, written(form, [INVALID[0]], style))
    assert not accepts(grammar, written(form, [Call("other", {})], style))


def test_python_can_tell_a_list_from_a_call_no_sooner_than_it_is_read() -> None:
    for form in ("pythonic", "llama4_pythonic"):
        assert triggered_calls(form, TOOLS) is None


def test_what_has_no_grammar_of_its_own_is_forced_as_json() -> None:
    odd = ToolDefinition("odd", {"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, True)
    assert forced_format("pythonic", [WEATHER]) == "pythonic"
    assert forced_format("pythonic", [WEATHER, odd]) == "llama3_json"
    assert forced_format("llama4_pythonic", [WEATHER, odd]) == "llama3_json"
    assert forced_format(None, [WEATHER]) == "llama3_json"
    parsing = parser_options(
        OutputDialect(), ToolOptions((odd,), "required", False, "tool_choice"), include_reasoning=True
    )
    assert parsing is not None
    assert parsing.dialect.tools == "llama3_json"


def test_arguments_are_bound_by_keywords_that_the_compiler_passes_over_alone() -> None:
    odd = ToolDefinition("f", {"type": "object", "properties": {"a": {"minimum": 5}}, "required": ["a"]}, True)
    format_ = forced_calls("hermes", [odd], parallel=False)
    wrong = written("hermes", [Call("f", {"a": 3})])
    assert accepts(format_, wrong), "the compiler alone"
    enforced = json.loads(normalize_structural_tag(json.dumps(tagged(format_))))["format"]
    assert not accepts(enforced, wrong)
    assert accepts(enforced, written("hermes", [Call("f", {"a": 6})]))
    unenforceable = ToolDefinition(
        "f", {"type": "object", "properties": {"a": {"type": "array", "contains": {}}}}, True
    )
    with pytest.raises(GrammarRefused, match=r"json_schema: .*contains"):
        normalize_structural_tag(json.dumps(tagged(forced_calls("hermes", [unenforceable], parallel=False))))


def test_an_answer_is_a_call_or_what_its_format_says() -> None:
    wanted = {"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}}, "required": ["sky"]}
    guided = OutputGrammar(Grammar("json", json.dumps(wanted)), "response_format")
    combined = combined_grammar(OutputDialect("hermes"), ToolOptions(TOOLS, "auto", True, "tools"), guided)
    assert combined is not None
    assert combined.field == "response_format"
    format_ = json.loads(combined.grammar.text)["format"]
    assert accepts(format_, '{"sky": "blue"}')
    assert accepts(format_, written("hermes", VALID[0]))
    assert not accepts(format_, "The sky is blue.")
    jsonschema.validate({"sky": "blue"}, wanted)


def test_a_grammar_binds_behind_the_thoughts_of_a_model_that_thinks() -> None:
    guided = OutputGrammar(Grammar("regex", "a+"), "guided_regex")
    planned = combined_grammar(OutputDialect(None, "mistral"), None, guided)
    assert planned is not None
    assert planned.grammar == Grammar("regex", "a+", "[/THINK]")
    assert combined_grammar(OutputDialect(), None, guided) == guided
    forced_call: Any = ToolOptions(TOOLS, "required", True, "tool_choice")
    with pytest.raises(RequestError, match="guided_regex"):
        combined_grammar(OutputDialect("hermes"), forced_call, guided)


@pytest.mark.parametrize("dialect", [OutputDialect("hermes"), OutputDialect(CHANNELS_OF_CALLS, CHANNELS_OF_REASONING)])
def test_a_forced_call_has_no_text_for_a_response_format(dialect: OutputDialect) -> None:
    """Frameworks send both: the format is that of the answer behind the calls."""
    options = ToolOptions(TOOLS, "required", True, "tool_choice")
    format_ = OutputGrammar(Grammar("json", "{}"), "response_format.json_schema.schema")
    assert combined_grammar(dialect, options, format_) == combined_grammar(dialect, options, None)
    with pytest.raises(RequestError, match=r"structured_outputs\.json: not allowed together"):
        combined_grammar(dialect, options, format_._replace(field="structured_outputs.json"))
