"""Granite 3's calls: a JSON array of objects behind `<|tool_call|>` or `<tool_call>`, or without any mark."""

from __future__ import annotations

from collections.abc import Container

from services.gateway.parsing.events import CallOpenings, ParseEvents
from services.gateway.parsing.json_calls import read_call_array
from services.gateway.parsing.text_cursor import Reading, TextCursor

TAGS = ("<|tool_call|>", "<tool_call>")


class Granite:
    """Reads Granite's calls. Without a tag only its form shows that a list holds calls, so they must be of the
    request's functions and have no other keys than calls."""

    openings = CallOpenings(anywhere=TAGS, line_start=("[",))

    def __init__(self, functions: Container[str]) -> None:
        self._functions = functions

    def read(self, cursor: TextCursor, events: ParseEvents) -> Reading[None]:
        """Reads one array. Raises NotAToolCall."""
        tag = yield from cursor.match_ahead(TAGS)
        if tag is not None:
            yield from cursor.expect(tag)
            yield from cursor.skip_whitespace()
        yield from read_call_array(cursor, events, only=None if tag else self._functions, other_keys=tag is not None)
