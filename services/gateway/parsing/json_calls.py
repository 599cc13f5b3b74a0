"""Reads JSON (RFC 8259) while it arrives, and tool calls that are JSON objects.

The text is passed on as the model wrote it; a syntax error is found at the character where it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container

from services.gateway.parsing.events import ParseEvents
from services.gateway.parsing.text_cursor import Emit, NotAToolCall, OutputEnd, Reading, TextCursor

MAX_DEPTH = 128
"""Levels of nested objects and arrays; hardly any JSON reader accepts more."""

PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
NUMBER_CHARACTERS = re.compile(r"[-+.0-9eE]*")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
WORD = re.compile(r"[a-z]*")
BLANK = re.compile(r"[ \t\n\r]*")
SURROGATE = re.compile("[\ud800-\udfff]")
HEX = frozenset("0123456789abcdefABCDEF")
CLOSERS = {"{": "}", "[": "]"}


def read_value(cursor: TextCursor, emit: Emit) -> Reading[None]:
    """Reads one JSON value and passes its text to `emit`. Raises NotAToolCall where it is not JSON."""
    closers: list[str] = []
    while True:
        character = yield from cursor.peek()
        if character in CLOSERS:
            cursor.skip(1)
            emit(character)
            closers.append(CLOSERS[character])
            if len(closers) > MAX_DEPTH:
                raise NotAToolCall
            yield from _blank(cursor, emit)
            if (yield from cursor.peek()) != closers[-1]:
                if character == "{":
                    yield from _key(cursor, emit)
                continue
        else:
            yield from _scalar(cursor, emit, character)
        if not (yield from _goes_on(cursor, emit, closers)):
            return


def _goes_on(cursor: TextCursor, emit: Emit, closers: list[str]) -> Reading[bool]:
    """After a value: reads closers, up to where the next value starts. Returns False where everything is closed."""
    while closers:
        yield from _blank(cursor, emit)
        character = yield from cursor.peek()
        if character != closers[-1] and character != ",":
            raise NotAToolCall if character else OutputEnd
        cursor.skip(1)
        emit(character)
        if character == ",":
            yield from _blank(cursor, emit)
            if closers[-1] == "}":
                yield from _key(cursor, emit)
            return True
        closers.pop()
    return False


def _key(cursor: TextCursor, emit: Emit) -> Reading[None]:
    yield from read_string(cursor, emit)
    yield from _blank(cursor, emit)
    emit((yield from cursor.expect(":")))
    yield from _blank(cursor, emit)


def _blank(cursor: TextCursor, emit: Emit) -> Reading[None]:
    emit((yield from cursor.read_run(BLANK)))


def _scalar(cursor: TextCursor, emit: Emit, first: str) -> Reading[None]:
    if first == '"':
        yield from read_string(cursor, emit)
    elif first and first in "-0123456789":
        number = yield from cursor.read_run(NUMBER_CHARACTERS)
        if not NUMBER.fullmatch(number):
            raise NotAToolCall
        emit(number)
    elif first:
        word = yield from cursor.read_run(WORD)
        if word not in ("true", "false", "null"):
            raise NotAToolCall
        emit(word)
    else:
        raise OutputEnd


def read_string(cursor: TextCursor, emit: Emit) -> Reading[None]:
    """Reads one JSON string and passes it to `emit` with its quotation marks. Raises NotAToolCall."""
    emit((yield from cursor.expect('"')))
    while True:
        emit(cursor.read_match(PLAIN))
        character = yield from cursor.peek()
        if character == '"':
            cursor.skip(1)
            emit(character)
            return
        if character == "\\":
            yield from _escape(cursor, emit)
        elif not character:
            raise OutputEnd
        elif not PLAIN.fullmatch(character):
            raise NotAToolCall


def _escape(cursor: TextCursor, emit: Emit) -> Reading[None]:
    cursor.skip(1)
    kind = yield from cursor.read_char()
    escape = "\\" + kind
    if kind == "u":
        for _ in range(4):
            escape += yield from cursor.read_char()
        if not HEX.issuperset(escape[2:]):
            raise NotAToolCall
    elif kind not in '"\\/bfnrt':
        raise NotAToolCall
    emit(escape)


def read_text(cursor: TextCursor) -> Reading[str]:
    """Reads a JSON string and returns its value. Raises NotAToolCall where that has a lone surrogate."""
    parts: list[str] = []
    yield from read_string(cursor, parts.append)
    text: str = json.loads("".join(parts))
    if not text.isascii() and SURROGATE.search(text):
        raise NotAToolCall
    return text


def as_json(text: str) -> str:
    """Returns the text as it is written between the quotation marks of a JSON string. Escaping a text in parts and
    joining them gives the same."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


ARGUMENT_KEYS = ("arguments", "parameters")
TOLERATED_KEYS = ("id", "type")


def read_call_object(
    cursor: TextCursor, events: ParseEvents, *, only: Container[str] | None = None, other_keys: bool = False
) -> Reading[None]:
    """Reads one call, `{"name": …, "arguments": {…}}` with the keys in any order, up to its brace. Raises NotAToolCall.

    The call starts once its name is known and its arguments have started. `only`: the allowed names, where nothing but
    its form shows that the object is a call. `other_keys`: whether the object may have more keys, which are skipped.
    """
    yield from cursor.expect("{")
    name: str | None = None
    waiting: list[str] | None = None
    """Arguments that came before the name."""
    while True:
        yield from cursor.skip_whitespace()
        key = yield from read_text(cursor)
        yield from cursor.skip_whitespace()
        yield from cursor.expect(":")
        yield from cursor.skip_whitespace()
        if key == "name" and name is None:
            name = yield from _name(cursor, only)
            if waiting is not None:
                events.start_call(name)
                events.arguments("".join(waiting))
        elif key in ARGUMENT_KEYS and waiting is None:
            waiting = yield from _arguments(cursor, events, name)
        elif key in TOLERATED_KEYS or (other_keys and key not in ("name", *ARGUMENT_KEYS)):
            yield from read_value(cursor, lambda _: None)
        else:
            raise NotAToolCall
        yield from cursor.skip_whitespace()
        if (yield from cursor.expect(",", "}")) == "}":
            break
    if not events.in_call:
        raise NotAToolCall


def read_call_array(
    cursor: TextCursor, events: ParseEvents, *, only: Container[str] | None = None, other_keys: bool = False
) -> Reading[None]:
    """Reads `[{…}, {…}]`, each a call as `read_call_object` reads it. The bracket at the end may be missing at the
    output's end. Raises NotAToolCall."""
    yield from cursor.expect("[")
    while True:
        yield from cursor.skip_whitespace()
        yield from read_call_object(cursor, events, only=only, other_keys=other_keys)
        events.end_call()
        cursor.mark()
        yield from cursor.skip_whitespace()
        if not (yield from cursor.peek()) or (yield from cursor.expect(",", "]")) == "]":
            cursor.mark()
            return


def _name(cursor: TextCursor, only: Container[str] | None) -> Reading[str]:
    name = yield from read_text(cursor)
    if not name or (only is not None and name not in only):
        raise NotAToolCall
    return name


def _arguments(cursor: TextCursor, events: ParseEvents, name: str | None) -> Reading[list[str]]:
    """Reads an object: emitted as the call's arguments where the name is known, otherwise returned in pieces."""
    if (yield from cursor.peek()) != "{":
        raise NotAToolCall
    early: list[str] = []
    if name is not None:
        events.start_call(name)
        yield from read_value(cursor, events.arguments)
    else:
        yield from read_value(cursor, early.append)
    return early
