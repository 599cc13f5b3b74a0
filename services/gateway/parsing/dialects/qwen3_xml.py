"""Qwen3-Coder's calls: `<function=NAME><parameter=KEY>VALUE</parameter>…</function>`, turned into JSON arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from services.gateway.parsing.dialects.parameter_values import ArgumentsObject, read_argument
from services.gateway.parsing.events import ParseEvents
from services.gateway.parsing.text_cursor import NotAToolCall, Reading, TextCursor

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
NAME = re.compile(r"[^<>\n]*")
VALUE_ENDS = (PARAMETER_END, PARAMETER, FUNCTION_END)
"""A value also ends where the next one starts: models forget to close them."""


def read_xml_call(cursor: TextCursor, events: ParseEvents, schemas: Mapping[str, Any]) -> Reading[None]:
    """Reads one call; `schemas` are those of all functions. Raises NotAToolCall."""
    yield from cursor.expect(FUNCTION)
    name = yield from _name(cursor)
    events.start_call(name)
    arguments = ArgumentsObject(events, schemas.get(name))
    while True:
        yield from cursor.skip_whitespace()
        if (yield from cursor.expect(PARAMETER, FUNCTION_END)) == FUNCTION_END:
            arguments.close()
            return
        schema = arguments.add((yield from _name(cursor)))
        end = yield from read_argument(cursor, events.arguments, schema, VALUE_ENDS, lines=True)
        if end == PARAMETER_END:
            yield from cursor.expect(PARAMETER_END)


def _name(cursor: TextCursor) -> Reading[str]:
    name = (yield from cursor.read_run(NAME)).strip()
    yield from cursor.expect(">")
    if not name:
        raise NotAToolCall
    return name
