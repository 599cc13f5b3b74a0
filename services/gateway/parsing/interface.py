"""What packages with parsers of their own implement: all that they need to import (docs/plugins.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.parsing.events import CallOpenings, ParseEvents
from services.gateway.parsing.json_calls import read_call_object, read_value
from services.gateway.parsing.reasoning import read_marked
from services.gateway.parsing.text_cursor import NotAToolCall, OutputEnd, Reading, TextCursor
from shared.messages.dialects import Thinking, ThinkingMarks

__all__ = [
    "CallOpenings",
    "NotAToolCall",
    "OutputEnd",
    "ParseEvents",
    "Reading",
    "ReasoningParser",
    "TextCursor",
    "Thinking",
    "ThinkingMarks",
    "ToolParser",
    "read_call_object",
    "read_value",
]


class ToolParser:
    """A format of tool calls; one object for each output. Implements `events.ToolCallFormat`.

    Whatever `read` raises but NotAToolCall fails its request, and no other one. It runs on the gateway's event loop:
    what it computes delays every open stream.
    """

    openings: CallOpenings
    """Texts with which a call may start."""
    call_template = ""
    """`BEGIN{name}MIDDLE{arguments}END`, by which calls are forced where the client requires one. Empty: they are
    forced as `llama3_json`, and calls of strict functions are not constrained."""
    sees_special_tokens = False
    """Whether marks are special tokens of the model; these then stay in the text of requests with tools."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        """`schemas`: the JSON schema of each function's arguments, by its name."""
        self.schemas = schemas

    def read(self, cursor: TextCursor, events: ParseEvents) -> Reading[None]:
        """Reads one call or several, from an opening on, and marks the cursor after each complete call.

        Raises NotAToolCall: what was read since the cursor's mark is text then.
        """
        raise NotImplementedError


class ReasoningParser:
    """A format of reasoning; one object for each output. Bound as a `ToolParser` is."""

    marks: ThinkingMarks
    """What opens and closes the reasoning. A grammar binds, and `thinking_token_budget` forces, the end mark."""
    starts_open = False
    """Whether all up to the end mark is reasoning, even without the opening mark (as deepseek_r1)."""
    sees_special_tokens = False
    """Whether marks are special tokens of the model; these then stay in the text."""

    def read(self, cursor: TextCursor, events: ParseEvents, thinking: Thinking | None) -> Reading[None]:
        """Reads from the output's beginning up to where the answer starts. `thinking` says how the prompt ends, where
        one of the built-in formats' marks shows it. Unless overridden: what is between the marks."""
        yield from read_marked(cursor, events, self.marks, thinking, starts_open=self.starts_open)
