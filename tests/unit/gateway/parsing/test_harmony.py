"""Outputs of gpt-oss: messages in channels, as its format's description and vLLM's tests show them, and spoilt ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from services.gateway.api.errors import RequestError
from services.gateway.api.structured_outputs import OutputGrammar
from services.gateway.api.tool_grammars import combined_grammar, parser_options
from services.gateway.api.tools import ToolDefinition, ToolOptions
from services.gateway.parsing.output_dialect import OutputDialect
from shared.messages.generation import Grammar
from tests.support.gateway.tool_calls import Read, read

DIALECT = OutputDialect("openai", "openai_gptoss")
SCHEMAS: dict[str, Any] = {"f": {}, "g": {}}
F1, G = ("f", '{"a": 1}'), ("g", "{}")
NEXT = "<|end|><|start|>assistant"
ANALYSIS, COMMENTARY, FINAL = (f"<|channel|>{name}<|message|>" for name in ("analysis", "commentary", "final"))
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
NESTED = '{"o": {"k": ["}", "\\"{", {}]}, "s": "to=functions.g json é"}'

OUTPUTS = [
    # from the format's description
    (f'{ANALYSIS}User asks: "What is 2 + 2?"{NEXT}{FINAL}2 + 2 = 4.<|return|>',
     Read("2 + 2 = 4.", 'User asks: "What is 2 + 2?"', [])),
    (f"{ANALYSIS}Need f.{NEXT}{CALL}<|call|>", Read("", "Need f.", [F1])),
    (f"{ANALYSIS}Long.{NEXT}{COMMENTARY}**Plan**:\n1. f{NEXT}{CALL.replace(' <|con', '<|con')}<|call|>",
     Read("**Plan**:\n1. f", "Long.", [F1])),
    # vLLM's
    (f"{FINAL}This is a test", Read("This is a test", "", [])),
    (f"{ANALYSIS}So{NEXT}<|channel|>final <|constrain|>JSON <|message|>Yes", Read("Yes", "So", [])),
    (f"{ANALYSIS}So<|end|><|channel|>final<|message|>Yes", Read("Yes", "So", [])),
    (f"{ANALYSIS}So{NEXT}{CALL}{NEXT}<|channel|>commentary to=functions.g<|message|>{{}}<|call|>",
     Read("", "So", [F1, G])),
    (f"{CALL}{NEXT}<|channel|>commentary to=functions.g <|constrain|>json<|message|>", Read("", "", [F1, G])),
    (f"{CALL}{NEXT}{FINAL}This will do.", Read("This will do.", "", [F1])),
    (f"{ANALYSIS}So it", Read("", "So it", [])),
    # as the chat template writes calls
    (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', Read("", "", [F1])),
    (f"<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{NESTED}<|call|>",
     Read("", "", [("f", NESTED)])),
    (f"{ANALYSIS}One.{NEXT}{ANALYSIS}Two.{NEXT}{FINAL}A\n<|end|><|start|>assistant{FINAL}B",
     Read("A\n\nB", "One.\nTwo.", [])),
    ('<|channel|>commentary to=f <|constrain|>json<|message|>{"a": 1}<|call|>', Read("", "", [F1])),
    (f"{ANALYSIS}So{CALL.replace('<|channel|>', NEXT + '<|channel|>', 1)}\n", Read("", "So", [F1])),
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", Read("", "1 + 1", [])),
    ("No channel at all.", Read("No channel at all.", "", [])),
    ("", Read("", "", [])),
]  # fmt: skip

SPOILT = [
    '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": ?}',
    '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1',
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>foo",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>[1]",
    '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1} and more',
    "<|channel|>commentary to=functions. <|constrain|>json<|message|>{}",
    "<|channel|>commentary to=unknown<|message|>{}",
    "<|channel|>commentary to=functions.f",
]


@pytest.mark.parametrize(("text", "expected"), OUTPUTS)
def test_channels_are_told_apart_wherever_the_text_is_cut(text: str, expected: Read) -> None:
    how: Any = {"reasoning": "openai_gptoss"}
    assert read([text], "openai", SCHEMAS, **how) == expected
    assert read(list(text), "openai", SCHEMAS, **how) == expected
    for place in range(1, len(text)):
        assert read([text[:place], text[place:]], "openai", SCHEMAS, **how) == expected, place


@pytest.mark.parametrize("text", SPOILT)
def test_what_is_no_call_is_content_with_its_marks(text: str) -> None:
    for place in range(1, len(text)):
        got = read([text[:place], text[place:]], "openai", SCHEMAS, reasoning="openai_gptoss")
        assert (got.content, got.reasoning, got.calls) == (text, "", []), place
    after = read(
        [f"{ANALYSIS}So{NEXT}{text}<|end|><|start|>assistant{CALL}"], "openai", SCHEMAS, reasoning="openai_gptoss"
    )
    assert (after.content, after.reasoning, after.calls) == (text, "So", [F1])


def test_a_cut_leaves_an_open_call_standing_and_half_a_header_out() -> None:
    how: Any = {"reasoning": "openai_gptoss", "truncated": True}
    assert read([CALL[:-1]], "openai", SCHEMAS, **how) == Read("", "", [("f", '{"a": 1')])
    assert read([f"{ANALYSIS}So{NEXT}<|channel|>fin"], "openai", SCHEMAS, **how) == Read("", "So", [])


def test_a_continued_answer_begins_as_text() -> None:
    got = read([f" is 4.{NEXT}{FINAL}Yes"], "openai", SCHEMAS, reasoning="openai_gptoss", thinking="closed")
    assert got == Read(" is 4.\nYes", "", [])


def test_without_one_of_the_two_parsers_its_part_is_content() -> None:
    text = f"{ANALYSIS}So{NEXT}{CALL}<|call|>"
    assert read([text], None, reasoning="openai_gptoss") == Read(CALL, "So", [])
    assert read([text], "openai", SCHEMAS) == Read("So", "", [F1])


WEATHER = ToolDefinition("f", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, True)
OTHER = ToolDefinition("g", {"type": "object"}, False)
REASONED = f"{ANALYSIS}Hm < 5 to=functions.f{NEXT}"


def accepts(grammar: OutputGrammar | None, text: str) -> bool:
    assert grammar is not None
    return bool(_is_grammar_accept_string(xgrammar.Grammar.from_structural_tag(grammar.grammar.text), text))


def tools(choice: Any) -> ToolOptions:
    return ToolOptions((WEATHER, OTHER), choice, True, "tool_choice")


def test_a_forced_call_comes_behind_reasoning_and_ends_the_output() -> None:
    forced = combined_grammar(DIALECT, tools("required"), None)
    template_like = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}'
    for text in (CALL, REASONED + CALL, f"{REASONED}{COMMENTARY}I go.{NEXT}{CALL}", REASONED + template_like):
        assert accepts(forced, text), text
        assert read([text], "openai", SCHEMAS, reasoning="openai_gptoss").calls == [F1]
    for text in ("", "hi", f"{FINAL}hi", CALL.replace('"a"', '"b"'), CALL.replace("1", '"x"'), f"{CALL}{NEXT}{CALL}"):
        assert not accepts(forced, text), text
    assert parser_options(DIALECT._replace(tools=None), tools("required"), include_reasoning=True).dialect == DIALECT  # type: ignore[union-attr]


def test_strict_calls_fit_where_the_model_may_choose() -> None:
    chosen = combined_grammar(DIALECT, tools("auto"), None)
    for text in (
        REASONED + CALL,
        f"{REASONED}{FINAL}hi",
        CALL.replace("functions.f", "functions.g").replace("1", '"x"'),
    ):
        assert accepts(chosen, text), text
    assert not accepts(chosen, CALL.replace("1", '"x"'))
    assert combined_grammar(DIALECT, ToolOptions((OTHER,), "auto", True, "tools"), None) is None


def test_an_answers_format_binds_the_final_channel() -> None:
    wanted = OutputGrammar(Grammar("json", '{"type": "integer"}'), "response_format")
    alone = combined_grammar(DIALECT, None, wanted)
    assert accepts(alone, f"{REASONED}{FINAL}5")
    assert not accepts(alone, f"{REASONED}{FINAL}five")
    assert not accepts(alone, REASONED + CALL)
    either = combined_grammar(DIALECT, tools("auto"), wanted)
    assert accepts(either, f"{FINAL}5")
    assert accepts(either, REASONED + CALL)
    assert not accepts(either, "5")
    assert combined_grammar(DIALECT, None, None) is None
    assert combined_grammar(DIALECT, tools("required"), wanted) == combined_grammar(DIALECT, tools("required"), None)
    with pytest.raises(RequestError, match="structured_outputs"):
        combined_grammar(DIALECT, tools("required"), OutputGrammar(wanted.grammar, "structured_outputs.json"))
    with pytest.raises(RequestError, match="continue_final_message"):
        combined_grammar(DIALECT, None, wanted, continued=True)
    broken = OutputGrammar(Grammar("json", "{"), "guided_json")
    assert combined_grammar(DIALECT, None, broken) == broken, "its compiler will say"
    assert json.loads(alone.grammar.text)["type"] == "structural_tag"  # type: ignore[union-attr]
