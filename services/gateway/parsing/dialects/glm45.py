"""GLM 4.5's calls: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>`."""

from __future__ import annotations

import re

from services.gateway.parsing.dialects.parameter_values import ArgumentsObject, read_argument
from services.gateway.parsing.events import CallOpenings, ParseEvents
from services.gateway.parsing.output_dialect import Schemas
from services.gateway.parsing.text_cursor import NotAToolCall, Reading, TextCursor

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
NAME = re.compile(r"[^\s<>{}]*")
KEY_NAME = re.compile(r"[^<>\n]*")


class Glm45:
    """Reads GLM's calls, with or without line breaks between the marks. Only a value's own end mark ends it."""

    openings = CallOpenings(anywhere=(START,))

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas

    def read(self, cursor: TextCursor, events: ParseEvents) -> Reading[None]:
        """Reads one call. Raises NotAToolCall."""
        yield from cursor.expect(START)
        yield from cursor.skip_whitespace()
        name = yield from cursor.read_run(NAME)
        yield from cursor.skip_whitespace()
        first = yield from cursor.expect(KEY, END)
        if not name:
            raise NotAToolCall
        events.start_call(name)
        arguments = ArgumentsObject(events, self._schemas.get(name))
        mark = first
        while mark == KEY:
            schema = arguments.add((yield from cursor.read_run(KEY_NAME)).strip())
            yield from cursor.expect(KEY_END)
            yield from cursor.skip_whitespace()
            yield from cursor.expect(VALUE)
            yield from read_argument(cursor, events.arguments, schema, (VALUE_END,), lines=False)
            yield from cursor.expect(VALUE_END)
            yield from cursor.skip_whitespace()
            mark = yield from cursor.expect(KEY, END)
        arguments.close()
        events.end_call()
        cursor.mark()
