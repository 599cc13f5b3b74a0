"""Grammars by which a model calls tools in its own markup, with arguments that fit their schemas."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, assert_never

from services.gateway.tools.keywords import expressible, keywords
from services.gateway.tools.offer import Tool
from shared.dialects import ToolFormat
from shared.structural_tags import Format, either, literal, regex, sequence, tag

MOST_SPACE = 1
"""White space in a row within arguments: without a bound a model at a loss would go on with it for ever."""

HERMES, HERMES_END = "<tool_call>\n", "\n</tool_call>"
MISTRAL = "[TOOL_CALLS]"


def guidable(form: ToolFormat | None, tools: Iterable[Tool]) -> ToolFormat:
    """The format to force calls in: the model's own, but for what that has no grammar for, which is written as JSON."""
    if form is None or (form == "pythonic" and not all(expressible(tool) for tool in tools)):
        return "llama3_json"
    return form


def forced(form: ToolFormat, tools: Sequence[Tool], *, parallel: bool) -> Format:
    """One of these tools is called, or several one after the other; there is nothing else."""
    match form:
        case "hermes":
            return _several([_object(tool, "arguments", HERMES, HERMES_END) for tool in tools], "\n", parallel)
        case "qwen3_xml":
            return _several([_xml(tool) for tool in tools], "\n", parallel)
        case "llama3_json":
            return _several([_object(tool, "parameters") for tool in tools], "; ", parallel)
        case "mistral":  # of its two ways the model knows one, and shows which
            array = sequence(literal(MISTRAL), _array(tools, parallel), literal("]"))
            return either(array, _several(_mistral_named(tools), "", parallel))
        case "pythonic":
            calls = _several([keywords(tool, arguments) for tool in tools], ", ", parallel)
            return sequence(literal("["), calls, literal("]"))
        case _:
            assert_never(form)


def triggered(form: ToolFormat, tools: Sequence[Tool]) -> Format | None:
    """Any text, in which calls are written rightly: those of strict tools by their schemas, others with any object.
    None where the format does not allow that: what begins a call there may begin anything."""
    bound = [tool if tool.strict else tool._replace(parameters={"type": "object"}) for tool in tools]
    match form:
        case "hermes":
            return _behind("<tool_call>", [_object(tool, "arguments", HERMES, HERMES_END) for tool in bound])
        case "qwen3_xml":
            return _behind("<tool_call>", [_xml(tool) for tool in bound])
        case "llama3_json":
            return _behind('{"name": "', [_object(tool, "parameters") for tool in bound])
        case "mistral":
            return _behind(MISTRAL, [tag(MISTRAL, _array(bound, True), "]"), *_mistral_named(bound)])
        case "pythonic":
            return None
        case _:
            assert_never(form)


def arguments(schema: dict[str, Any], style: str = "json") -> Format:
    return {"type": "json_schema", "json_schema": schema, "style": style, "max_whitespace_cnt": MOST_SPACE}


def _several(calls: list[Format], separator: str, parallel: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": calls,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _behind(trigger: str, calls: list[Format]) -> Format:
    return {"type": "triggered_tags", "triggers": [trigger], "tags": calls}


def _object(tool: Tool, key: str, before: str = "", behind: str = "") -> Format:
    """`{"name": …, key: …}` between two texts."""
    return tag(f'{before}{{"name": {json.dumps(tool.name)}, "{key}": ', arguments(tool.parameters), "}" + behind)


def _xml(tool: Tool) -> Format:
    end = "</function>\n</tool_call>"  # on a line of its own, or where there are no parameters on the next
    return tag(f"<tool_call>\n<function={tool.name}>\n", arguments(tool.parameters, "qwen_xml"), ["\n" + end, end])


def _array(tools: Sequence[Tool], parallel: bool) -> Format:
    """` [{"name": …, "arguments": …}`, up to the bracket that closes it."""
    calls = _several([_object(tool, "arguments") for tool in tools], ", ", parallel)
    return sequence(regex(" ?"), literal("["), calls)


def _mistral_named(tools: Sequence[Tool]) -> list[Format]:
    """The name, and behind it the arguments, with a mark between or without."""
    marks = ("", "[ARGS]")
    return [tag(MISTRAL + tool.name + mark, arguments(tool.parameters), "") for tool in tools for mark in marks]
