"""Calls as Python writes them, in a list: `[f(a=1), g(b="x")]`, alone or after `<|python_start|>` (Llama 4)."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection

from services.gateway.parsing.events import CallOpenings, ParseEvents
from services.gateway.parsing.json_calls import CLOSERS, HEX, MAX_DEPTH, as_json
from services.gateway.parsing.text_cursor import Emit, NotAToolCall, OutputEnd, Reading, TextCursor

TAG, END = "<|python_start|>", "<|python_end|>"
NAME = re.compile(r"[^\s\[\](){},='\"]*")


class Pythonic:
    """Reads pythonic calls. Without a tag a list may be anything, so its calls must be of the request's functions."""

    def __init__(self, functions: Collection[str]) -> None:
        self._functions = functions
        self.openings = CallOpenings(anywhere=(TAG,), line_start=tuple(f"[{name}(" for name in functions))

    def read(self, cursor: TextCursor, events: ParseEvents) -> Reading[None]:
        """Reads one list of calls. Raises NotAToolCall."""
        tagged = (yield from cursor.match_ahead((TAG,))) is not None
        if tagged:
            yield from cursor.expect(TAG)
            yield from cursor.skip_whitespace()
        yield from cursor.expect("[")
        while True:
            yield from cursor.skip_whitespace()
            yield from self._read_call(cursor, events, None if tagged else self._functions)
            events.end_call()
            cursor.mark()
            yield from cursor.skip_whitespace()
            if not (yield from cursor.peek()) or (yield from cursor.expect(",", "]")) == "]":
                break
        if tagged and (yield from cursor.match_ahead((END,))):
            yield from cursor.expect(END)
        cursor.mark()

    def _read_call(self, cursor: TextCursor, events: ParseEvents, only: Collection[str] | None) -> Reading[None]:
        name = yield from cursor.read_run(NAME)
        yield from cursor.expect("(")
        if not name or (only is not None and name not in only):
            raise NotAToolCall
        yield from cursor.skip_whitespace()
        keys: set[str] = set()
        while (yield from cursor.peek()) != ")":
            yield from _read_argument(cursor, events, name, keys)
            yield from cursor.skip_whitespace()
            if (yield from cursor.peek()) != ")":
                yield from cursor.expect(",")
                yield from cursor.skip_whitespace()
        yield from cursor.expect(")")
        if not keys:
            events.start_call(name)
        events.arguments("}" if keys else "{}")


def _read_argument(cursor: TextCursor, events: ParseEvents, name: str, keys: set[str]) -> Reading[None]:
    """`key=value`. The first argument starts the call."""
    key = yield from cursor.read_run(NAME)
    yield from cursor.skip_whitespace()
    yield from cursor.expect("=")
    yield from cursor.skip_whitespace()
    if not key or key in keys:
        raise NotAToolCall
    if not keys:
        events.start_call(name)
    events.arguments(f'{", " if keys else "{"}"{as_json(key)}": ')
    keys.add(key)
    yield from read_python_value(cursor, events.arguments)


OPENINGS = CLOSERS | {"(": ")"}
AS_JSON = {"{": "{", "}": "}", "[": "[", "]": "]", "(": "[", ")": "]"}
WORD = re.compile(r"[^\s,:()\[\]{}'\"]*")
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
"""Python's literals and their JSON form. JSON's own literals are accepted, too, because models mix them up."""
PLAIN = {"'": re.compile(r"[^'\\\n]*"), '"': re.compile(r'[^"\\\n]*')}
PLAIN_LINES = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
ESCAPES = {"\\": "\\", "'": "'", '"': '"', "/": "/"}
ESCAPES |= {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}
"""`\\/` is JSON's: a grammar made from a JSON schema allows it."""
CODES = {"x": 2, "u": 4, "U": 8}


def read_python_value(cursor: TextCursor, emit: Emit) -> Reading[None]:
    """Reads one Python literal and passes it to `emit` as JSON. Raises NotAToolCall."""
    closers: list[str] = []
    while True:
        character = yield from cursor.peek()
        if character in OPENINGS:
            cursor.skip(1)
            emit(AS_JSON[character])
            closers.append(OPENINGS[character])
            if len(closers) > MAX_DEPTH:
                raise NotAToolCall
            yield from cursor.skip_whitespace()
            if (yield from cursor.peek()) != closers[-1]:
                yield from _key(cursor, emit, closers)
                continue
        else:
            yield from _scalar(cursor, emit, character)
        if not (yield from _goes_on(cursor, emit, closers)):
            return


def python_as_json(text: str) -> str:
    """Returns a complete text as JSON. Raises NotAToolCall where it is not a Python literal."""
    cursor = TextCursor()
    cursor.feed(text)
    cursor.close(truncated=False)
    parts: list[str] = []
    for _ in read_python_value(cursor, parts.append):
        raise AssertionError("a closed cursor never waits")
    if cursor.unread.strip():
        raise NotAToolCall
    return "".join(parts)


def _goes_on(cursor: TextCursor, emit: Emit, closers: list[str]) -> Reading[bool]:
    """After a value: reads closers, up to where the next value starts. Returns False where everything is closed."""
    while closers:
        yield from cursor.skip_whitespace()
        character = yield from cursor.read_char()
        if character == ",":
            yield from cursor.skip_whitespace()
            if (yield from cursor.peek()) != closers[-1]:
                emit(", ")
                yield from _key(cursor, emit, closers)
                return True
            character = yield from cursor.read_char()
        if character != closers.pop():
            raise NotAToolCall
        emit(AS_JSON[character])
    return False


def _key(cursor: TextCursor, emit: Emit, closers: list[str]) -> Reading[None]:
    """Reads the next key in a dictionary, elsewhere nothing."""
    if closers[-1] != "}":
        return
    yield from read_python_string(cursor, emit)
    yield from cursor.skip_whitespace()
    yield from cursor.expect(":")
    yield from cursor.skip_whitespace()
    emit(": ")


def _scalar(cursor: TextCursor, emit: Emit, first: str) -> Reading[None]:
    if first in PLAIN:
        yield from read_python_string(cursor, emit)
        return
    word = yield from cursor.read_run(WORD)
    if not word:
        raise NotAToolCall if first else OutputEnd
    emit(WORDS[word] if word in WORDS else _number(word))


def _number(word: str) -> str:
    with contextlib.suppress(ValueError):  # also where an integer has more digits than Python reads or writes
        return json.dumps(int(word, 0))
    with contextlib.suppress(ValueError):
        return json.dumps(float(word), allow_nan=False)
    raise NotAToolCall


def read_python_string(cursor: TextCursor, emit: Emit) -> Reading[None]:
    """Reads one string in single, double or triple quotation marks, without a prefix such as `r`. Raises
    NotAToolCall."""
    quote = yield from cursor.peek()
    if quote not in PLAIN:
        raise NotAToolCall if quote else OutputEnd
    end = quote * 3 if (yield from cursor.match_ahead((quote * 3,))) else quote
    yield from cursor.expect(end)
    plain = PLAIN if len(end) == 1 else PLAIN_LINES
    emit('"')
    while True:
        emit(as_json(cursor.read_match(plain[quote])))
        character = yield from cursor.peek()
        if character == "\\":
            emit((yield from _escape(cursor)))
        elif (yield from cursor.match_ahead((end,))):
            yield from cursor.expect(end)
            emit('"')
            return
        elif not character:
            raise OutputEnd
        elif not plain[quote].fullmatch(character):
            if character == "\n":
                raise NotAToolCall
            emit(as_json((yield from cursor.read_char())))


def _escape(cursor: TextCursor) -> Reading[str]:
    """Reads an escape sequence and returns it as JSON."""
    cursor.skip(1)
    kind = yield from cursor.read_char()
    if kind in ESCAPES:
        return as_json(ESCAPES[kind])
    if kind not in CODES:
        return as_json("\\" + kind)
    digits = ""
    for _ in range(CODES[kind]):
        digits += yield from cursor.read_char()
    if not HEX.issuperset(digits) or int(digits, 16) > 0x10FFFF:
        raise NotAToolCall
    code = int(digits, 16)
    # Half of a surrogate pair is not a character yet, but JSON can hold it as an escape.
    return f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else as_json(chr(code))
