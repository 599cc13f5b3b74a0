"""Calls in `<tool_call>…</tool_call>`: JSON inside (Hermes, Qwen 3), or `<function=…><parameter=…>` (Qwen3-Coder)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.parsing.dialects.qwen3_xml import FUNCTION, read_xml_call
from services.gateway.parsing.events import CallOpenings, ParseEvents
from services.gateway.parsing.json_calls import read_call_object
from services.gateway.parsing.text_cursor import Reading, TextCursor

START, END = "<tool_call>", "</tool_call>"


class TaggedCalls:
    """Reads both kinds. `bare`: calls of the second kind may come without the tag, which Qwen3-Coder omits at times."""

    def __init__(self, schemas: Mapping[str, Any], *, bare: bool) -> None:
        self._schemas = schemas
        self.openings = CallOpenings(anywhere=(START, FUNCTION) if bare else (START,))

    def read(self, cursor: TextCursor, events: ParseEvents) -> Reading[None]:
        """Reads one call with its tags. Raises NotAToolCall. The end tag may be missing at the end of the output."""
        tagged = (yield from cursor.match_ahead((START, FUNCTION))) == START
        if tagged:
            yield from cursor.expect(START)
            yield from cursor.skip_whitespace()
        if (yield from cursor.peek()) == "{":
            yield from read_call_object(cursor, events, other_keys=True)
        else:
            yield from read_xml_call(cursor, events, self._schemas)
        if tagged:
            yield from cursor.skip_whitespace()
            if (yield from cursor.peek()):
                yield from cursor.expect(END)
        events.end_call()
        cursor.mark()
