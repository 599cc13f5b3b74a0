"""The markup in which models write tool calls and thoughts: what the services must agree on about it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec import Struct

ToolFormat = Literal["hermes", "llama3_json", "mistral", "qwen3_xml", "pythonic"]
"""hermes: `<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen 2.5, Qwen 3). llama3_json: the JSON with
`parameters`, alone or behind `<|python_tag|>`. mistral: `[TOOL_CALLS]` with a JSON array, or with a name and arguments.
qwen3_xml: `<function=…><parameter=…>` (Qwen3-Coder). pythonic: `[f(a=1), g(b="x")]` (Llama 3.2, Llama 4)."""

ReasoningFormat = Literal["deepseek_r1", "qwen3", "mistral"]
"""deepseek_r1: the answer begins with thoughts, marked as such or not. qwen3: only where it is marked. mistral: the
same with other marks."""


class ThinkingMarks(NamedTuple):
    """The texts between which a model writes its thoughts."""

    start: str
    end: str


THINKING_MARKS: dict[ReasoningFormat, ThinkingMarks] = {
    "deepseek_r1": ThinkingMarks("<think>", "</think>"),
    "qwen3": ThinkingMarks("<think>", "</think>"),
    "mistral": ThinkingMarks("[THINK]", "[/THINK]"),
}

Thinking = Literal["open", "closed"]
"""How a chat's prompt ends. open: within the reasoning, which the output continues. closed: after the reasoning."""

MARKUP_TOKENS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *sorted({mark for marks in THINKING_MARKS.values() for mark in marks}),
)
"""Many models have special tokens for these texts. The parsers must see them, though other special tokens are
skipped."""


class Dialect(Struct, frozen=True, array_like=True):
    """What markup a model was trained on."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
