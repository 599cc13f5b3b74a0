"""Python literals, read as they come and passed on as JSON."""

from __future__ import annotations

import contextlib
import json
import re

from services.gateway.parsing.json_text import CLOSERS, HEX, MAX_DEPTH, as_json
from services.gateway.parsing.tape import Emit, Ended, NoCall, Reading, Tape

OPENINGS = CLOSERS | {"(": ")"}
AS_JSON = {"{": "{", "}": "}", "[": "[", "]": "]", "(": "[", ")": "]"}
WORD = re.compile(r"[^\s,:()\[\]{}'\"]*")
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
"""JSON's own are taken, too: models mix them up."""
PLAIN = {"'": re.compile(r"[^'\\\n]*"), '"': re.compile(r'[^"\\\n]*')}
PLAIN_LINES = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
ESCAPES = {"\\": "\\", "'": "'", '"': '"', "/": "/"}
ESCAPES |= {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}
"""`\\/` is JSON's: a grammar made from a JSON schema allows it."""
CODES = {"x": 2, "u": 4, "U": 8}


def read_python_value(tape: Tape, emit: Emit) -> Reading[None]:
    """Reads one literal. Raises NoCall."""
    closers: list[str] = []
    while True:
        character = yield from tape.peek()
        if character in OPENINGS:
            tape.skip(1)
            emit(AS_JSON[character])
            closers.append(OPENINGS[character])
            if len(closers) > MAX_DEPTH:
                raise NoCall
            yield from tape.space()
            if (yield from tape.peek()) != closers[-1]:
                yield from _key(tape, emit, closers)
                continue
        else:
            yield from _scalar(tape, emit, character)
        if not (yield from _goes_on(tape, emit, closers)):
            return


def python_as_json(text: str) -> str:
    """A whole text as JSON. Raises NoCall where it is no literal."""
    tape = Tape()
    tape.feed(text)
    tape.close(cut=False)
    parts: list[str] = []
    for _ in read_python_value(tape, parts.append):
        raise AssertionError("a closed tape makes nobody wait")
    if tape.rest.strip():
        raise NoCall
    return "".join(parts)


def _goes_on(tape: Tape, emit: Emit, closers: list[str]) -> Reading[bool]:
    """Behind a value: reads what closes, up to where the next value begins. False where all is closed."""
    while closers:
        yield from tape.space()
        character = yield from tape.char()
        if character == ",":
            yield from tape.space()
            if (yield from tape.peek()) != closers[-1]:
                emit(", ")
                yield from _key(tape, emit, closers)
                return True
            character = yield from tape.char()
        if character != closers.pop():
            raise NoCall
        emit(AS_JSON[character])
    return False


def _key(tape: Tape, emit: Emit, closers: list[str]) -> Reading[None]:
    """In a dictionary, the next key; elsewhere nothing."""
    if closers[-1] != "}":
        return
    yield from read_python_string(tape, emit)
    yield from tape.space()
    yield from tape.expect(":")
    yield from tape.space()
    emit(": ")


def _scalar(tape: Tape, emit: Emit, first: str) -> Reading[None]:
    if first in PLAIN:
        yield from read_python_string(tape, emit)
        return
    word = yield from tape.run(WORD)
    if not word:
        raise NoCall if first else Ended
    emit(WORDS[word] if word in WORDS else _number(word))


def _number(word: str) -> str:
    with contextlib.suppress(ValueError):  # also where an integer has more digits than Python reads or writes
        return json.dumps(int(word, 0))
    with contextlib.suppress(ValueError):
        return json.dumps(float(word), allow_nan=False)
    raise NoCall


def read_python_string(tape: Tape, emit: Emit) -> Reading[None]:
    """Reads one string, in single, double or three quotation marks; with no letter before it."""
    quote = yield from tape.peek()
    if quote not in PLAIN:
        raise NoCall if quote else Ended
    end = quote * 3 if (yield from tape.ahead((quote * 3,))) else quote
    yield from tape.expect(end)
    plain = PLAIN if len(end) == 1 else PLAIN_LINES
    emit('"')
    while True:
        emit(as_json(tape.take(plain[quote])))
        character = yield from tape.peek()
        if character == "\\":
            emit((yield from _escape(tape)))
        elif (yield from tape.ahead((end,))):
            yield from tape.expect(end)
            emit('"')
            return
        elif not character:
            raise Ended
        elif not plain[quote].fullmatch(character):
            if character == "\n":
                raise NoCall
            emit(as_json((yield from tape.char())))


def _escape(tape: Tape) -> Reading[str]:
    """An escape as it stands in JSON."""
    tape.skip(1)
    kind = yield from tape.char()
    if kind in ESCAPES:
        return as_json(ESCAPES[kind])
    if kind not in CODES:
        return as_json("\\" + kind)
    digits = ""
    for _ in range(CODES[kind]):
        digits += yield from tape.char()
    if not HEX.issuperset(digits) or int(digits, 16) > 0x10FFFF:
        raise NoCall
    code = int(digits, 16)
    # Half of a surrogate pair is no character yet; as an escape it stands in JSON as well.
    return f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else as_json(chr(code))
