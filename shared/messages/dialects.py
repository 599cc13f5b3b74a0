"""The markup in which models write tool calls and reasoning: the formats and marks that all services agree on."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from msgspec import Struct

ToolFormat = Literal[
    "hermes",
    "llama3_json",
    "mistral",
    "qwen3_xml",
    "pythonic",
    "llama4_pythonic",
    "deepseek_v3",
    "deepseek_v31",
    "granite",
    "kimi_k2",
    "glm45",
    "minimax_m2",
    "minimax",
    "openai",
]
"""vLLM's names. hermes: `<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen 2.5, Qwen 3). llama3_json:
the JSON with `parameters`, alone or behind `<|python_tag|>`. mistral: `[TOOL_CALLS]` with a JSON array, or with a name
and arguments. qwen3_xml: `<function=…><parameter=…>` (Qwen3-Coder). pythonic: `[f(a=1), g(b="x")]`. The others have
their models' names; `services/gateway/parsing/dialects/` shows each."""

TOOL_ALIASES: dict[str, ToolFormat] = {
    "qwen3_coder": "qwen3_xml",
    "llama4_json": "llama3_json",
    "granite4": "hermes",
    "glm47": "glm45",
}
"""Other names of vLLM's for the same formats."""

ReasoningFormat = Literal["deepseek_r1", "qwen3", "mistral", "granite", "kimi_k2", "openai_gptoss"]
"""deepseek_r1: the output begins with reasoning, with or without the opening mark. qwen3: reasoning only between its
marks. mistral, granite: like qwen3, with other marks. kimi_k2: like qwen3; a tool call ends the reasoning, too.
openai_gptoss: what is in gpt-oss's channel for it."""

CHANNELS_OF_CALLS: Final[ToolFormat] = "openai"
CHANNELS_OF_REASONING: Final[ReasoningFormat] = "openai_gptoss"
"""The formats of models that write messages in channels (harmony). They are read together."""

REASONING_ALIASES: dict[str, ReasoningFormat] = {
    "deepseek_v3": "qwen3",
    "glm45": "qwen3",
    "glm47": "qwen3",
    "minimax_m2": "deepseek_r1",
}
"""Other names of vLLM's for the same formats."""


class ThinkingMarks(NamedTuple):
    """The texts that open and close a model's reasoning."""

    start: str
    end: str


THINKING_MARKS: dict[ReasoningFormat, ThinkingMarks] = {
    "deepseek_r1": ThinkingMarks("<think>", "</think>"),
    "qwen3": ThinkingMarks("<think>", "</think>"),
    "mistral": ThinkingMarks("[THINK]", "[/THINK]"),
    "granite": ThinkingMarks("Here is my thought process:", "Here is my response:"),
    "kimi_k2": ThinkingMarks("<think>", "</think>"),
}

CHANNEL_MARKS = ThinkingMarks("<|channel|>analysis<|message|>", "<|end|>")
"""Of each message of gpt-oss that is reasoning. There may be several, anywhere in its output."""

CHANNEL_STOPS = ("<|call|>", "<|return|>")
"""Tokens that end gpt-oss's outputs, whatever its configuration says."""

Thinking = Literal["open", "closed"]
"""How a chat's prompt ends. open: within the reasoning, which the output continues. closed: after the reasoning."""

ThinkingControl = Literal["enable_thinking", "reasoning_effort"]
"""A variable by which a chat template can be told whether the model is to reason, or how much."""

MARKUP_TOKENS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<|tool_call|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", "<tool_calls>", "</tool_calls>"),
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
    documents: bool = False
    """Whether they show a chat's documents."""
