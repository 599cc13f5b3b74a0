"""The formats of single families of models, as the models and their templates write them, well and badly.

What is marked as vLLM's is an example of that project's own parser tests.
"""

from __future__ import annotations

import json

import pytest

from services.gateway.parsing.events import ToolCallStart
from services.gateway.parsing.output_dialect import OutputDialect
from services.gateway.parsing.output_parser import OutputParser, ParserOptions
from services.gateway.parsing.parser_choice import ParserChoice
from shared.messages.dialects import REASONING_ALIASES, TOOL_ALIASES, Dialect, ReasoningFormat, Thinking, ToolFormat
from tests.support.gateway.tool_calls import Read, read

SCHEMAS = {
    "f": {
        "properties": {
            "a": {"type": "integer"},
            "s": {"type": "string"},
            "o": {"type": "object"},
            "n": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        }
    },
    "g": {},
}
F1, G = ("f", '{"a": 1}'), ("g", "{}")
MARKS = (
    '"</arg_value <tool_call> </tool_call> <|tool_call_end|> <|tool_calls_section_end|> <｜tool▁call▁end｜> '
    '</invoke> </minimax:tool_call> <|python_end|> ``` )] }}"'
)
"""A JSON string with marks of every format inside it, but for the end marks of values that are not JSON."""
NESTED = f'{{"o": {{"k": [1, {{"d": {MARKS}}}], "e": {{}}}}, "s": "\\"q\\" \\\\ \\u00e9\\n"}}'
NESTED_CALL = ("f", NESTED)
OBJECT = f'{{"k": {MARKS}}}'

CALLS, CALL, SEPARATOR, CALL_END, CALLS_END = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI, ARGUMENTS, KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
M2, M2_END = "<minimax:tool_call>", "</minimax:tool_call>"


def deepseek_v3(name: str, arguments: str) -> str:
    return f"{CALL}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


READ: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    # deepseek_v3, and v3.1; the first four are vLLM's
    ("deepseek_v3", CALLS + deepseek_v3("f", '{"city": "Tokyo", "unit": "celsius"}') + CALLS_END, "",
     [("f", '{"city": "Tokyo", "unit": "celsius"}')]),
    ("deepseek_v3", "Let me check.\n" + CALLS + deepseek_v3("f", '{"a": 1}') + deepseek_v3("g", "{}") + CALLS_END,
     "Let me check.", [F1, G]),
    ("deepseek_v31", f'normal text{CALLS}{CALL}f{SEPARATOR}{{"x":1}}{CALL_END}{CALLS_END}', "normal text",
     [("f", '{"x":1}')]),
    ("deepseek_v31", f'A{CALLS}{CALL}f{SEPARATOR}{{"x":1}}{CALL_END}{CALL}g{SEPARATOR}{{"y":2}}{CALL_END}{CALLS_END} B',
     "A B", [("f", '{"x":1}'), ("g", '{"y":2}')]),
    ("deepseek_v3", CALLS + deepseek_v3("f", NESTED) + "\n" + deepseek_v3("f", '{"a": 1}') + CALLS_END, "",
     [NESTED_CALL, F1]),
    ("deepseek_v31", CALLS + deepseek_v3("f", '{"a": 1}') + CALLS_END, "", [F1]),
    ("deepseek_v3", f'{CALL}f{SEPARATOR}{{"a": 1}}', "", [F1]),
    ("deepseek_v31", f"{CALLS}{CALL}f{SEPARATOR}{NESTED}{CALL_END}{CALLS_END}\n", "", [NESTED_CALL]),
    # granite; the first four are vLLM's
    ("granite", '<|tool_call|> [{"name": "f", "arguments": {"a": 1}}]', "", [F1]),
    ("granite", '<|tool_call|> [\n  {"name": "f", "arguments": {"a": 1}},\n  {"name": "g", "arguments": {}}\n]', "",
     [F1, G]),
    ("granite", '<|tool_call|> [{"arguments": {"a": 1}, "name": "f"}, {"arguments": {}, "name": "g"}]', "", [F1, G]),
    ("granite", 'Look.\n<|tool_call|> [{"name": "f", "arguments": {"a": 1}}]\nThere.', "Look.\nThere.", [F1]),
    ("granite", f'<tool_call>[{{"name": "f", "arguments": {NESTED}}}]', "", [NESTED_CALL]),
    ("granite", '[{"name": "f", "arguments": {"a": 1}}]', "", [F1]),
    ("granite", '[{"name": "unknown", "arguments": {}}]', '[{"name": "unknown", "arguments": {}}]', []),
    ("granite", '<|tool_call|>[{"name": "unknown", "arguments": {}}]', "", [("unknown", "{}")]),
    ("granite", "[a link](there) and\n[1, 2]", "[a link](there) and\n[1, 2]", []),
    # llama4_pythonic; the first three are vLLM's
    ("llama4_pythonic", "<|python_start|>[f(s='LA'), g()]<|python_end|>", "", [("f", '{"s": "LA"}'), G]),
    ("llama4_pythonic", "<|python_start|>[new(name='Doe', age=9, address={'city': 'LA'}, role=None, aliases=['J'])]",
     "", [("new", '{"name": "Doe", "age": 9, "address": {"city": "LA"}, "role": null, "aliases": ["J"]}')]),
    ("llama4_pythonic", r"[f(s='Martha\'s Vineyard', n='\"cool units\"')]", "",
     [("f", '{"s": "Martha\'s Vineyard", "n": "\\"cool units\\""}')]),
    ("llama4_pythonic", f"<|python_start|>[f(s={MARKS!r}, a=1)]<|python_end|>", "",
     [("f", f'{{"s": {json.dumps(MARKS, ensure_ascii=False)}, "a": 1}}')]),
    ("llama4_pythonic", "[new(a=1)]", "[new(a=1)]", []),
    # kimi_k2; the first four are vLLM's
    ("kimi_k2", f'Two. {SECTION}{KIMI}functions.f:0 {ARGUMENTS}{{"a": 1}} {KIMI_END}{KIMI}functions.g:1{ARGUMENTS}{{}}'
     f"{KIMI_END}{SECTION_END}", "Two.", [F1, G]),
    ("kimi_k2", f'{SECTION}{KIMI}f:0{ARGUMENTS}{{"a": 1}}{KIMI_END}{SECTION_END}', "", [F1]),
    ("kimi_k2", f'{SECTION}{KIMI}functions.f:0{ARGUMENTS}{{\n  "s": "<div>"\n}}{KIMI_END}{SECTION_END}', "",
     [("f", '{\n  "s": "<div>"\n}')]),
    ("kimi_k2", f'Help. {SECTION}{KIMI}functions.f:1{ARGUMENTS}{{"a": 1}}{KIMI_END}{SECTION_END} After.',
     "Help. After.", [F1]),
    ("kimi_k2", f"{SECTION}\n{KIMI}\nfunctions.f:0{ARGUMENTS}\n{NESTED}\n{KIMI_END}\n{SECTION_END}\n", "",
     [NESTED_CALL]),
    ("kimi_k2", f'<|tool_call_section_begin|>{KIMI}functions.f:0{ARGUMENTS}{{"a": 1}}{KIMI_END}'
     "<|tool_call_section_end|>", "", [F1]),
    ("kimi_k2", f"{KIMI}functions.a.b:c:12{ARGUMENTS}{{}}{KIMI_END}", "", [("a.b:c", "{}")]),
    # glm45; the first four are vLLM's
    ("glm45", "<tool_call>f\n    <arg_key>s</arg_key>\n    <arg_value>Dallas</arg_value>\n    <arg_key>a</arg_key>\n"
     "    <arg_value>5</arg_value>\n    </tool_call>", "", [("f", '{"s": "Dallas", "a": 5}')]),
    ("glm45", "<tool_call>f<arg_key>s</arg_key><arg_value>A</arg_value></tool_call><tool_call>g</tool_call>", "",
     [("f", '{"s": "A"}'), G]),
    ("glm45", "Checking.<tool_call>g\n</tool_call>", "Checking.", [G]),
    ("glm45", "One.\n\n<tool_call>g\n</tool_call>\n\nmeanwhile,\n\n<tool_call>g\n</tool_call>", "One.\n\nmeanwhile,",
     [G, G]),
    ("glm45", f"<tool_call>f\n<arg_key>o</arg_key>\n<arg_value>{OBJECT}</arg_value>\n</tool_call>", "",
     [("f", f'{{"o": {OBJECT}}}')]),
    ("glm45", "<tool_call>f<arg_key>s</arg_key><arg_value> 5\n<arg_key> </tool_call> é</arg_value></tool_call>", "",
     [("f", '{"s": " 5\\n<arg_key> </tool_call> é"}')]),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>many</arg_value><arg_key>new</arg_key><arg_value>5"
     "</arg_value><arg_key>n</arg_key><arg_value>null</arg_value></tool_call>", "",
     [("f", '{"a": "many", "new": "5", "n": null}')]),
    # minimax_m2; the first four are vLLM's
    ("minimax_m2", f'{M2}<invoke name="f"><parameter name="s">Seattle</parameter><parameter name="a">5</parameter>'
     f"</invoke>{M2_END}", "", [("f", '{"s": "Seattle", "a": 5}')]),
    ("minimax_m2", f'Let me. {M2}<invoke name="f"><parameter name="a">1</parameter></invoke><invoke name="g"></invoke>'
     f"{M2_END}", "Let me.", [F1, G]),
    ("minimax_m2", f'{M2}<invoke name="f"><parameter name="n">Alice</parameter></invoke><invoke name="f">'
     f'<parameter name="n">null</parameter></invoke>{M2_END}', "", [("f", '{"n": "Alice"}'), ("f", '{"n": null}')]),
    ("minimax_m2", f'{M2}<invoke name="f"><parameter name="o">{{"theme": "dark", "size": 14}}</parameter></invoke>'
     f"{M2_END}", "", [("f", '{"o": {"theme": "dark", "size": 14}}')]),
    ("minimax_m2", f'{M2}\n<invoke name="f">\n<parameter name="o">{OBJECT}</parameter>\n</invoke>\n{M2_END}\nB', "\nB",
     [("f", f'{{"o": {OBJECT}}}')]),
    ("minimax_m2", f'{M2}<invoke name=f><parameter name=\'s\'>\n <invoke name="g"> </invoke>\n</parameter></invoke>',
     "", [("f", '{"s": " <invoke name=\\"g\\"> </invoke>"}')]),
    # minimax; the first three are vLLM's
    ("minimax", '<tool_calls>\n{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {}}\n</tool_calls>', "",
     [F1, G]),
    ("minimax", 'Help. <tool_calls>\n{"name": "f", "arguments": {"a": 1}}\n</tool_calls>', "Help.", [F1]),
    ("minimax", '<tool_calls>\n{"name": "f", "arguments": {"a": 1}}', "", [F1]),
    ("minimax", f'<tool_calls>\n{{\n"name": "f",\n"arguments": {NESTED}\n}}\n</tool_calls>\n', "", [NESTED_CALL]),
]  # fmt: skip

UNREADABLE: list[tuple[ToolFormat, str]] = [
    # vLLM's
    ("deepseek_v31", f"Let me look that up.{CALLS}get_weather"),
    ("deepseek_v31", f'{CALLS}foo{SEPARATOR}{{"x":1}}{CALLS_END}'),
    ("deepseek_v3", f'{CALLS}{CALL}function{SEPARATOR}f\n```json\n{{"city": "Tokyo"\n```{CALL_END}{CALLS_END}'),
    ("granite", '<|tool_call|> [{"name": "func", "arguments": {'),
    ("granite", '<|tool_call|> {"name": "func", "arguments": {}}'),
    ("granite", '[{"name": "func", "arguments": "not a dict"}]'),
    ("granite", 'Some text [{"name": "func"}]'),
    ("llama4_pythonic", "<|python_start|>[calc(x=1e999)]<|python_end|>"),
    ("kimi_k2", f"Reasoning. {SECTION}{SECTION_END}"),
    ("kimi_k2", f'Help. {SECTION}{KIMI}functions.invalid.0 {ARGUMENTS}{{"city": "Beijing"}}{KIMI_END}{SECTION_END}'),
    ("glm45", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>Seattle</arg_value>\n<arg_key>incomplete_arg\n"
     "<arg_value>value</arg_value>\n</tool_call>"),
    ("glm45", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>Beijing</arg_value>"),
    ("minimax", '<tool_calls>\n{"name": "missing_args"}\n</tool_calls>'),
    # ours
    ("deepseek_v3", f'{CALLS}{CALL}function{SEPARATOR}f\n{{"a": 1}}{CALL_END}'),
    ("deepseek_v31", f"{CALLS}{CALL}{SEPARATOR}{{}}{CALL_END}"),
    ("deepseek_v31", f"{CALLS}{CALL}f{SEPARATOR}[1]{CALL_END}"),
    ("deepseek_v31", f"{CALLS}{CALL}f{SEPARATOR}{{}} and more{CALL_END}"),
    ("kimi_k2", f"{SECTION}noise{KIMI}"),
    ("kimi_k2", f"{SECTION}{KIMI}0{ARGUMENTS}{{}}{KIMI_END}{SECTION_END}"),
    ("kimi_k2", f"{SECTION}{KIMI}functions.f:0{ARGUMENTS}5{KIMI_END}{SECTION_END}"),
    ("kimi_k2", f'{SECTION}{KIMI}functions.f:0{ARGUMENTS}{{"a": 1'),
    ("glm45", "<tool_call></tool_call>"),
    ("glm45", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value>"
     "</tool_call>"),
    ("minimax_m2", f"{M2}{M2_END}"),
    ("minimax_m2", f'{M2}<invoke name=""></invoke>{M2_END}'),
    ("minimax_m2", f'{M2}<invoke name="f"><parameter name="a">1</invoke>{M2_END}'),
    ("minimax_m2", f'{M2}<invoke name="f">text</invoke>{M2_END}'),
    ("minimax_m2", "<invoke name=\"f\"></invoke>"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), READ)
def test_calls_are_found_wherever_the_text_is_cut(
    form: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    expected = Read(content, "", calls)
    assert read([text], form, SCHEMAS) == expected
    assert read(list(text), form, SCHEMAS) == expected
    for place in range(1, len(text)):
        assert read([text[:place], text[place:]], form, SCHEMAS) == expected, place


@pytest.mark.parametrize(("form", "text"), UNREADABLE)
def test_what_is_no_call_is_content_unchanged_wherever_the_text_is_cut(form: ToolFormat, text: str) -> None:
    whole = read([text], form, SCHEMAS)
    assert (whole.content, whole.calls) == (text, [])
    for place in range(1, len(text)):
        assert read([text[:place], text[place:]], form, SCHEMAS) == whole, place


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        ("deepseek_v3", f'{CALLS}{CALL}function{SEPARATOR}f\n```json\n{{"s": "Bei', '{"s": "Bei'),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"s": "Bei', '{"s": "Bei'),
        ("kimi_k2", f'{SECTION}{KIMI}functions.f:0 {ARGUMENTS}{{"s": "Bei', '{"s": "Bei'),
        ("glm45", "<tool_call>f<arg_key>s</arg_key><arg_value>Bei", '{"s": "Bei'),
        ("minimax_m2", f'{M2}<invoke name="f"><parameter name="s">Bei', '{"s": "Bei'),
        ("minimax", '<tool_calls>\n{"name": "f", "arguments": {"s": "Bei', '{"s": "Bei'),
    ],
)
def test_a_call_that_the_length_cuts_off_stands_as_far_as_it_came(form: ToolFormat, text: str, arguments: str) -> None:
    cut = read([text], form, SCHEMAS, truncated=True)
    if form in ("glm45", "minimax_m2"):  # a text's quotation mark is written at once
        arguments += '"'
    assert (cut.content, cut.calls[0][1].rstrip('"')) == ("", arguments.rstrip('"'))
    assert read([text], form, SCHEMAS).content == text


def test_a_call_behind_a_broken_one_is_found() -> None:
    good = f'{KIMI}functions.f:1{ARGUMENTS}{{"a": 1}}{KIMI_END}{SECTION_END}'
    bad = f'{SECTION}{KIMI}functions.f:0{ARGUMENTS}{{"a": ?}}{KIMI_END}'
    assert read([bad + good], "kimi_k2", SCHEMAS) == Read(bad, "", [F1], broken=1)


def test_kimis_calls_keep_their_ids() -> None:
    text = f"{SECTION}{KIMI}functions.f:3 {ARGUMENTS}{{}}{KIMI_END}{KIMI}g:4{ARGUMENTS}{{}}{KIMI_END}{SECTION_END}"
    parser = OutputParser(ParserOptions(OutputDialect("kimi_k2"), SCHEMAS))
    starts = [event for event in parser.feed(text) if isinstance(event, ToolCallStart)]
    assert starts == [ToolCallStart("f", "functions.f:3"), ToolCallStart("g", "g:4")]
    alone = OutputParser(ParserOptions(OutputDialect("kimi_k2"), {"f": {}}))
    assert alone.feed(f"{SECTION}{KIMI}0{ARGUMENTS}")[:1] == []
    assert alone.feed("{")[:1] == [ToolCallStart("f", "0")], "the only function that there is, as in vLLM"


THOUGHTS: list[tuple[ReasoningFormat, Thinking | None, str, str, str]] = [
    ("granite", None, "Here is my thought process:This is a section Here is my response:The rest",
     "This is a section", "The rest"),
    ("granite", None, "Here's my thought process: so\nHere's my response: Yes", "so", "Yes"),
    ("granite", None, "Here is my thought failure", "", "Here is my thought failure"),
    ("granite", None, "Here is my thought process: foo Here was Here is my response: bar", "foo Here was", "bar"),
    ("granite", None, "Here is my thought process: foo Here is my", "foo Here is my", ""),
    ("kimi_k2", None, "<think>so</think>Yes", "so", "Yes"),
    ("kimi_k2", "open", "so</think>Yes", "so", "Yes"),
    ("kimi_k2", None, "Yes", "", "Yes"),
    ("kimi_k2", "open", f"so {SECTION}{KIMI}functions.f:0{ARGUMENTS}{{}}{KIMI_END}{SECTION_END}", "so",
     f"{SECTION}{KIMI}functions.f:0{ARGUMENTS}{{}}{KIMI_END}{SECTION_END}"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "thinking", "text", "reasoning", "content"), THOUGHTS)
def test_thoughts_end_where_their_family_ends_them(
    form: ReasoningFormat, thinking: Thinking | None, text: str, reasoning: str, content: str
) -> None:
    for place in range(1, len(text)):
        got = read([text[:place], text[place:]], None, reasoning=form, thinking=thinking)
        assert got == Read(content, reasoning, []), place


def test_kimis_calls_end_its_thoughts() -> None:
    call = f'{SECTION}{KIMI}functions.f:0{ARGUMENTS}{{"a": 1}}{KIMI_END}{SECTION_END}'
    assert read([f"<think>so {call}"], "kimi_k2", SCHEMAS, reasoning="kimi_k2") == Read("", "so", [F1])


def test_vllms_other_names_mean_the_same_formats() -> None:
    for name, form in TOOL_ALIASES.items():
        assert ParserChoice(name, "none").dialect(Dialect()).tools == form
    for name, reasoning in REASONING_ALIASES.items():
        assert ParserChoice("none", name).dialect(Dialect()).reasoning == reasoning
