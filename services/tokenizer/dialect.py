"""Which markup a model speaks, by the marks in its chat templates."""

from __future__ import annotations

from collections.abc import Mapping

from shared.dialects import Dialect, ReasoningFormat, ToolFormat

TOOL_MARKS: tuple[tuple[str, ToolFormat | None], ...] = (
    ("<arg_key>", None),
    ("<function=", "qwen3_xml"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("[func_name", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters":', "llama3_json"),
)
"""The first that is found decides. GLM's `<arg_key>` lies in a `<tool_call>`, too, and is a markup nobody reads."""

REASONING_MARKS: tuple[tuple[str, ReasoningFormat], ...] = (
    *(("<think>", "qwen3"), ("</think>", "qwen3")),
    *(("[THINK]", "mistral"), ("[/THINK]", "mistral")),
)
"""None says that answers begin with unmarked thoughts: where the template opens them, each prompt shows it."""


def dialect_of(templates: Mapping[str, str]) -> Dialect:
    """By template name: the one named `tool_use`, where there is one, shows how tools are called."""
    default = templates.get("default", "")
    calls = templates.get("tool_use", default)
    tools = next((name for mark, name in TOOL_MARKS if mark in calls), None)
    reasoning = next((name for mark, name in REASONING_MARKS if mark in default or mark in calls), None)
    return Dialect(tools if "tools" in calls else None, reasoning)
