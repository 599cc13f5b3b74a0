"""Llama 3's calls: `{"name": …, "parameters": {…}}`, alone or after `<|python_tag|>`, separated by `;`."""

from __future__ import annotations

from collections.abc import Container

from services.gateway.parsing.events import CallOpenings, ParseEvents
from services.gateway.parsing.json_calls import read_call_object
from services.gateway.parsing.text_cursor import Reading, TextCursor

TAGS, END = ("<|python_tag|>", "<|python_start|>"), "<|python_end|>"


class Llama3Json:
    """Reads Llama's calls. Without a tag only its form shows that an object is a call, so it must name a function of
    the request and have no other keys than a call."""

    openings = CallOpenings(anywhere=TAGS, line_start=("{",))

    def __init__(self, functions: Container[str]) -> None:
        self._functions = functions

    def read(self, cursor: TextCursor, events: ParseEvents) -> Reading[None]:
        """Reads all calls that follow each other. Raises NotAToolCall."""
        tag = yield from cursor.match_ahead(TAGS)
        if tag is not None:
            yield from cursor.expect(tag)
            yield from cursor.skip_whitespace()
        while True:
            yield from read_call_object(cursor, events, only=None if tag else self._functions)
            events.end_call()
            cursor.mark()
            if not (yield from _another(cursor)):
                break
        if tag is not None and (yield from cursor.match_ahead((END,))):
            yield from cursor.expect(END)
            cursor.mark()


def _another(cursor: TextCursor) -> Reading[bool]:
    """Whether `;` and another object follow. If so, reads up to that object, otherwise nothing."""
    yield from cursor.skip_whitespace()
    if (yield from cursor.peek()) == ";":
        cursor.skip(1)
        yield from cursor.skip_whitespace()
        if (yield from cursor.peek()) == "{":
            return True
    cursor.rewind()
    return False
