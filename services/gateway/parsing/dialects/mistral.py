"""Mistral's calls after `[TOOL_CALLS]`: a JSON array of objects, or (newer) each call's name and then its arguments."""

from __future__ import annotations

import re

from services.gateway.parsing.events import CallOpenings, ParseEvents
from services.gateway.parsing.json_calls import read_call_array, read_call_object, read_value
from services.gateway.parsing.text_cursor import NotAToolCall, Reading, TextCursor

START, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAME = re.compile(r"[^\s\[\]{}\"]*")


class Mistral:
    """Parser of Mistral's tool calls, in the old form (a JSON array) and the new one (name and arguments)."""

    openings = CallOpenings(anywhere=(START,))

    def read(self, cursor: TextCursor, events: ParseEvents) -> Reading[None]:
        """Reads one array, or one call. Raises NotAToolCall."""
        yield from cursor.expect(START)
        yield from cursor.skip_whitespace()
        match (yield from cursor.peek()):
            case "[":
                yield from read_call_array(cursor, events, other_keys=True)
            case "{":
                yield from read_call_object(cursor, events, other_keys=True)
                _finish(cursor, events)
            case _:
                yield from _read_named(cursor, events)


def _read_named(cursor: TextCursor, events: ParseEvents) -> Reading[None]:
    """Reads one call of the form `name{…}`, `name[ARGS]{…}` or `name[CALL_ID]…[ARGS]{…}`."""
    name = yield from cursor.read_run(NAME)
    if (yield from cursor.match_ahead((CALL_ID, ARGUMENTS))) == CALL_ID:
        yield from cursor.expect(CALL_ID)
        yield from cursor.read_run(NAME)
    if (yield from cursor.match_ahead((ARGUMENTS,))):
        yield from cursor.expect(ARGUMENTS)
    yield from cursor.skip_whitespace()
    if not name or (yield from cursor.peek()) != "{":
        raise NotAToolCall
    events.start_call(name)
    yield from read_value(cursor, events.arguments)
    _finish(cursor, events)


def _finish(cursor: TextCursor, events: ParseEvents) -> None:
    events.end_call()
    cursor.mark()
