"""The markup in which models write tool calls and reasoning: the formats and marks that all services agree on."""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec import Struct

ToolFormat = Literal["hermes", "llama3_json", "mistral", "qwen3_xml", "pythonic"]
"""hermes: `<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen 2.5, Qwen 3). llama3_json: the JSON with
`parameters`, alone or behind `<|python_tag|>`. mistral: `[TOOL_CALLS]` with a JSON array, or with a name and arguments.
qwen3_xml: `<function=…><parameter=…>` (Qwen3-Coder). pythonic: `[f(a=1), g(b="x")]` (Llama 3.2, Llama 4)."""

ReasoningFormat = Literal["deepseek_r1", "qwen3", "mistral"]
"""deepseek_r1: the output begins with reasoning, with or without the opening mark. qwen3: reasoning only between its
marks. mistral: like qwen3, with other marks."""


class ThinkingMarks(NamedTuple):
    """The texts that open and close a model's reasoning."""

    start: str
    end: str


THINKING_MARKS: dict[ReasoningFormat, ThinkingMarks] = {
    "deepseek_r1": ThinkingMarks("<think>", "</think>"),
    "qwen3": ThinkingMarks("<think>", "</think>"),
    "mistral": ThinkingMarks("[THINK]", "[/THINK]"),
}

Thinking = Literal["open", "closed"]
"""How a chat's prompt ends. open: within the reasoning, which the output continues. closed: after the reasoning."""

ThinkingControl = Literal["enable_thinking", "reasoning_effort"]
"""A variable by which a chat template can be told whether the model is to reason, or how much."""

MARKUP_TOKENS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *sorted({mark for marks in THINKING_MARKS.values() for mark in marks}),
)
"""Texts for which many models have special tokens. The parsers must see them, so they stay in the text even when other
special tokens are skipped."""


class Dialect(Struct, frozen=True, array_like=True):
    """The markup that a model was trained on; None where it has none."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    controls: tuple[ThinkingControl, ...] = ()
    """What the chat templates read."""
