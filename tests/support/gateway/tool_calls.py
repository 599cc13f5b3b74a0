"""Tool calls as models write them, in every format: what the parsers must read back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from services.gateway.parsing.events import (
    ContentText,
    ParseEvent,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallRetraction,
    ToolCallStart,
)
from services.gateway.parsing.output_dialect import OutputDialect
from services.gateway.parsing.output_parser import OutputParser, ParserOptions
from shared.messages.dialects import ToolFormat


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


class Read(NamedTuple):
    """What came of an output."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    """Names, and arguments as JSON."""
    broken: int = 0


def written(form: ToolFormat, calls: list[Call], style: str = "") -> str:
    """Several calls in one output. `style` tells a format's variants apart."""
    match form, style:
        case ("hermes", _):
            return "\n".join(f"<tool_call>\n{_object(call, 'arguments')}\n</tool_call>" for call in calls)
        case ("llama3_json", "tag"):
            return "<|python_tag|>" + "; ".join(_object(call, "parameters") for call in calls)
        case ("llama3_json", _):
            return "; ".join(_object(call, "parameters") for call in calls)
        case ("mistral", "named"):
            return "".join(f"[TOOL_CALLS]{call.name}{_json(call.arguments)}" for call in calls)
        case ("mistral", "args"):
            return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{_json(call.arguments)}" for call in calls)
        case ("mistral", _):
            return "[TOOL_CALLS] [" + ", ".join(_object(call, "arguments") for call in calls) + "]"
        case ("qwen3_xml", _):
            return "\n".join(f"<tool_call>\n{_xml(call)}\n</tool_call>" for call in calls)
        case ("pythonic", "json"):
            return "[" + ", ".join(f"{call.name}({_keywords(call, _json)})" for call in calls) + "]"
        case ("pythonic", _):
            return "[" + ", ".join(f"{call.name}({_keywords(call)})" for call in calls) + "]"
        case ("llama4_pythonic", "json"):
            return written("pythonic", calls, "json")
        case ("llama4_pythonic", _):
            return f"<|python_start|>{written('pythonic', calls)}<|python_end|>"
        case ("deepseek_v3", _):
            fenced = "\n".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{_json(call.arguments)}\n```<｜tool▁call▁end｜>"
                for call in calls
            )
            return f"<｜tool▁calls▁begin｜>{fenced}<｜tool▁calls▁end｜>"
        case ("deepseek_v31", _):
            plain = "".join(
                f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{_json(call.arguments)}<｜tool▁call▁end｜>"
                for call in calls
            )
            return f"<｜tool▁calls▁begin｜>{plain}<｜tool▁calls▁end｜>"
        case ("granite", style):
            return f"{style}[" + ", ".join(_object(call, "arguments") for call in calls) + "]"
        case ("kimi_k2", _):
            counted = "".join(
                f"<|tool_call_begin|>functions.{call.name}:{number}"
                f"<|tool_call_argument_begin|>{_json(call.arguments)}<|tool_call_end|>"
                for number, call in enumerate(calls)
            )
            return f"<|tool_calls_section_begin|>{counted}<|tool_calls_section_end|>"
        case ("glm45", "lines"):
            return "\n".join(_glm(call, "\n") for call in calls)
        case ("glm45", _):
            return "\n".join(_glm(call, "") for call in calls)
        case ("minimax_m2", _):
            return f"<minimax:tool_call>\n{''.join(map(_invoke, calls))}</minimax:tool_call>"
        case ("minimax", _):
            return "<tool_calls>\n" + "".join(f"{_object(call, 'arguments')}\n" for call in calls) + "</tool_calls>"
    raise AssertionError(form)


STYLES: list[tuple[ToolFormat, str]] = [
    ("hermes", ""),
    ("llama3_json", ""),
    ("llama3_json", "tag"),
    ("mistral", ""),
    ("mistral", "named"),
    ("mistral", "args"),
    ("qwen3_xml", ""),
    ("pythonic", ""),
    ("pythonic", "json"),
    ("llama4_pythonic", ""),
    ("llama4_pythonic", "json"),
    ("deepseek_v3", ""),
    ("deepseek_v31", ""),
    ("granite", "<|tool_call|>"),
    ("granite", "<tool_call>"),
    ("granite", ""),
    ("kimi_k2", ""),
    ("glm45", ""),
    ("glm45", "lines"),
    ("minimax_m2", ""),
    ("minimax", ""),
]
FORMS = tuple(dict.fromkeys(form for form, _ in STYLES))
"""All but openai, which is no markup within a text."""
FRAMED = ("qwen3_xml", "minimax_m2")
"""Formats in which a text's own line break at either end cannot be told from the markup's."""
WITHOUT_JSON = (*FRAMED, "glm45", "pythonic", "llama4_pythonic")
"""Formats of which the arguments are not the model's own JSON, byte for byte."""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(call: Call, key: str) -> str:
    return f'{{"name": {_json(call.name)}, "{key}": {_json(call.arguments)}}}'


def _keywords(call: Call, shown: Callable[[Any], str] = repr) -> str:
    return ", ".join(f"{key}={shown(value)}" for key, value in call.arguments.items())


def _xml(call: Call) -> str:
    parameters = "".join(f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in call.arguments.items())
    return f"<function={call.name}>\n{parameters}</function>"


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _glm(call: Call, between: str) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>{between}<arg_value>{_bare(value)}</arg_value>{between}"
        for key, value in call.arguments.items()
    )
    return f"<tool_call>{call.name}{between}{pairs}</tool_call>"


def _invoke(call: Call) -> str:
    parameters = "".join(
        f'<parameter name="{key}">{_bare(value)}</parameter>\n' for key, value in call.arguments.items()
    )
    return f'<invoke name="{call.name}">\n{parameters}</invoke>\n'


def schema_of(call: Call) -> dict[str, Any]:
    """A schema that says what type each argument has."""
    return {"type": "object", "properties": {key: {"type": _type(value)} for key, value in call.arguments.items()}}


def _type(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return "null" if value is None else names[type(value)]


def read(
    parts: list[str],
    tools: ToolFormat | None,
    schemas: dict[str, Any] | None = None,
    *,
    reasoning: Any = None,
    thinking: Any = None,
    truncated: bool = False,
    parallel: bool = True,
) -> Read:
    """Parses an output that comes in these parts."""
    parser = OutputParser(ParserOptions(OutputDialect(tools, reasoning), schemas or {}, parallel))
    parser.thinking = thinking
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return assembled([*pieces, *parser.finish(truncated=truncated)])


def assembled(pieces: list[ParseEvent]) -> Read:
    content = reasoning = ""
    calls: list[tuple[str, str]] = []
    calling, broken = False, 0
    for piece in pieces:
        match piece:
            case ContentText(text):
                assert not calling, "text within a call"
                content += text
            case ReasoningText(text):
                reasoning += text
            case ToolCallStart(name, _):
                assert not calling, "a call within a call"
                calls.append((name, ""))
                calling = True
            case ToolCallArguments(text):
                assert calling, "arguments of no call"
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
            case ToolCallEnd():
                calling = False
            case ToolCallRetraction():
                calls.pop()
                calling, broken = False, broken + 1
    return Read(content, reasoning, calls, broken)


def cut_at(text: str, places: list[int]) -> list[str]:
    """The text in parts that begin at these places."""
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]
