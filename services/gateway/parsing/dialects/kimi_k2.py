"""Kimi K2's calls: `<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{…}<|tool_call_end|>`."""

from __future__ import annotations

import re
from collections.abc import Collection

from services.gateway.parsing.dialects.sections import SectionMarks, expect_end, read_section
from services.gateway.parsing.events import ParseEvents
from services.gateway.parsing.json_calls import read_value
from services.gateway.parsing.text_cursor import NotAToolCall, Reading, TextCursor

SECTION = SectionMarks(
    ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    "<|tool_call_begin|>",
    ("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
)
"""The model writes the section's marks in the singular at times."""
ARGUMENTS, END = "<|tool_call_argument_begin|>", "<|tool_call_end|>"
IDENTITY = re.compile(r"[^\s<>{}]*")
NAMED = re.compile(r"(?:functions\.)?(.+):([0-9]+)")


class KimiK2:
    """Reads Kimi's calls. Before the arguments comes the call's id, which the chat template writes in later turns."""

    openings = SECTION.openings

    def __init__(self, functions: Collection[str]) -> None:
        self._functions = functions

    def read(self, cursor: TextCursor, events: ParseEvents) -> Reading[None]:
        """Reads one section of calls. Raises NotAToolCall."""
        yield from read_section(cursor, events, SECTION, lambda: self._read_call(cursor, events))

    def _read_call(self, cursor: TextCursor, events: ParseEvents) -> Reading[None]:
        yield from cursor.skip_whitespace()
        identity = yield from cursor.read_run(IDENTITY)
        yield from cursor.skip_whitespace()
        yield from cursor.expect(ARGUMENTS)
        yield from cursor.skip_whitespace()
        if (yield from cursor.peek()) != "{":
            raise NotAToolCall
        events.start_call(self._name(identity), identity)
        yield from read_value(cursor, events.arguments)
        yield from expect_end(cursor, END)

    def _name(self, identity: str) -> str:
        """The function's name. A number alone is that of the only function that there is. Raises NotAToolCall."""
        if match := NAMED.fullmatch(identity):
            return match[1]
        if identity.isascii() and identity.isdigit() and len(self._functions) == 1:
            return next(iter(self._functions))
        raise NotAToolCall
