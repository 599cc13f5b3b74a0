"""MiniMax's calls: XML in `<minimax:tool_call>` (M2), or JSON objects in `<tool_calls>` (M1)."""

from __future__ import annotations

import re

from services.gateway.parsing.dialects.parameter_values import ArgumentsObject, read_argument
from services.gateway.parsing.events import CallOpenings, ParseEvents
from services.gateway.parsing.json_calls import read_call_object
from services.gateway.parsing.output_dialect import Schemas
from services.gateway.parsing.text_cursor import NotAToolCall, Reading, TextCursor

START, END = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END = "<invoke name=", "</invoke>"
PARAMETER, PARAMETER_END = "<parameter name=", "</parameter>"
NAME = re.compile(r"[^<>\n]*")
M1_START, M1_END = "<tool_calls>", "</tool_calls>"


class MiniMaxM2:
    """Reads `<invoke name="NAME"><parameter name="KEY">VALUE</parameter>…</invoke>`, once or several times between the
    marks. Only a value's own end mark ends it."""

    openings = CallOpenings(anywhere=(START,))

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas

    def read(self, cursor: TextCursor, events: ParseEvents) -> Reading[None]:
        """Reads all calls between the marks. Raises NotAToolCall."""
        yield from cursor.expect(START)
        yield from cursor.skip_whitespace()
        yield from cursor.expect(INVOKE)
        while True:
            yield from self._read_call(cursor, events)
            events.end_call()
            cursor.mark()
            yield from cursor.skip_whitespace()
            if not (yield from cursor.peek()) or (yield from cursor.expect(INVOKE, END)) == END:
                cursor.mark()
                return

    def _read_call(self, cursor: TextCursor, events: ParseEvents) -> Reading[None]:
        name = yield from _read_name(cursor)
        if not name:
            raise NotAToolCall
        events.start_call(name)
        arguments = ArgumentsObject(events, self._schemas.get(name))
        while True:
            yield from cursor.skip_whitespace()
            if (yield from cursor.expect(PARAMETER, INVOKE_END)) == INVOKE_END:
                arguments.close()
                return
            schema = arguments.add((yield from _read_name(cursor)))
            yield from read_argument(cursor, events.arguments, schema, (PARAMETER_END,), lines=True)
            yield from cursor.expect(PARAMETER_END)


def _read_name(cursor: TextCursor) -> Reading[str]:
    """Reads up to the tag's end. Quotation marks may be missing."""
    name = (yield from cursor.read_run(NAME)).strip()
    yield from cursor.expect(">")
    return name[1:-1] if len(name) > 1 and name[0] in "\"'" and name[-1] == name[0] else name


class MiniMaxM1:
    """Reads JSON objects, each on a line of its own."""

    openings = CallOpenings(anywhere=(M1_START,))

    def read(self, cursor: TextCursor, events: ParseEvents) -> Reading[None]:
        """Reads all calls between the marks. Raises NotAToolCall."""
        yield from cursor.expect(M1_START)
        yield from cursor.skip_whitespace()
        while True:
            yield from read_call_object(cursor, events, other_keys=True)
            events.end_call()
            cursor.mark()
            yield from cursor.skip_whitespace()
            if (yield from cursor.peek()) != "{":
                break
        if (yield from cursor.match_ahead((M1_END,))):
            yield from cursor.expect(M1_END)
            cursor.mark()
        else:
            cursor.rewind()
