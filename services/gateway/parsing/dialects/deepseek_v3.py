"""DeepSeek's calls: `function<｜tool▁sep｜>`, the name and fenced JSON (V3, R1), or the name, the separator and JSON
(V3.1)."""

from __future__ import annotations

import re

from services.gateway.parsing.dialects.sections import SectionMarks, expect_end, read_section
from services.gateway.parsing.events import ParseEvents
from services.gateway.parsing.json_calls import read_value
from services.gateway.parsing.text_cursor import NotAToolCall, Reading, TextCursor

SECTION = SectionMarks(("<｜tool▁calls▁begin｜>",), "<｜tool▁call▁begin｜>", ("<｜tool▁calls▁end｜>",))
SEPARATOR, END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, LANGUAGE = "```", "json"
NAME = re.compile(r"[^\s<>`{}]*")


class DeepSeekV3:
    """Reads both forms, whichever the model was trained on."""

    openings = SECTION.openings

    def read(self, cursor: TextCursor, events: ParseEvents) -> Reading[None]:
        """Reads one section of calls. Raises NotAToolCall."""
        yield from read_section(cursor, events, SECTION, lambda: _read_call(cursor, events))


def _read_call(cursor: TextCursor, events: ParseEvents) -> Reading[None]:
    name = yield from _read_name(cursor)
    yield from cursor.expect(SEPARATOR)
    yield from cursor.skip_whitespace()
    if (yield from cursor.peek()) == "{":
        yield from _read_arguments(cursor, events, name)
    else:
        name = yield from _read_name(cursor)
        yield from cursor.expect(FENCE)
        if (yield from cursor.match_ahead((LANGUAGE,))):
            yield from cursor.expect(LANGUAGE)
        yield from cursor.skip_whitespace()
        yield from _read_arguments(cursor, events, name)
        yield from expect_end(cursor, FENCE)
    yield from expect_end(cursor, END)


def _read_name(cursor: TextCursor) -> Reading[str]:
    yield from cursor.skip_whitespace()
    name = yield from cursor.read_run(NAME)
    yield from cursor.skip_whitespace()
    return name


def _read_arguments(cursor: TextCursor, events: ParseEvents, name: str) -> Reading[None]:
    if not name or (yield from cursor.peek()) != "{":
        raise NotAToolCall
    events.start_call(name)
    yield from read_value(cursor, events.arguments)
