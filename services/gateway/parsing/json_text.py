"""JSON (RFC 8259), read as it comes: its text is passed on as the model wrote it, and a mistake is seen where it is."""

from __future__ import annotations

import json
import re

from services.gateway.parsing.tape import Emit, Ended, NoCall, Reading, Tape

MAX_DEPTH = 128
"""Objects and lists within one another; beyond it hardly any reader of JSON follows."""

PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
NUMBER_CHARACTERS = re.compile(r"[-+.0-9eE]*")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
WORD = re.compile(r"[a-z]*")
BLANK = re.compile(r"[ \t\n\r]*")
SURROGATE = re.compile("[\ud800-\udfff]")
HEX = frozenset("0123456789abcdefABCDEF")
CLOSERS = {"{": "}", "[": "]"}


def read_value(tape: Tape, emit: Emit) -> Reading[None]:
    """Reads one value. Raises NoCall where it is no JSON."""
    closers: list[str] = []
    while True:
        character = yield from tape.peek()
        if character in CLOSERS:
            tape.skip(1)
            emit(character)
            closers.append(CLOSERS[character])
            if len(closers) > MAX_DEPTH:
                raise NoCall
            yield from _blank(tape, emit)
            if (yield from tape.peek()) != closers[-1]:
                if character == "{":
                    yield from _key(tape, emit)
                continue
        else:
            yield from _scalar(tape, emit, character)
        if not (yield from _goes_on(tape, emit, closers)):
            return


def _goes_on(tape: Tape, emit: Emit, closers: list[str]) -> Reading[bool]:
    """Behind a value: reads what closes, up to where the next value begins. False where all is closed."""
    while closers:
        yield from _blank(tape, emit)
        character = yield from tape.peek()
        if character != closers[-1] and character != ",":
            raise NoCall if character else Ended
        tape.skip(1)
        emit(character)
        if character == ",":
            yield from _blank(tape, emit)
            if closers[-1] == "}":
                yield from _key(tape, emit)
            return True
        closers.pop()
    return False


def _key(tape: Tape, emit: Emit) -> Reading[None]:
    yield from read_string(tape, emit)
    yield from _blank(tape, emit)
    emit((yield from tape.expect(":")))
    yield from _blank(tape, emit)


def _blank(tape: Tape, emit: Emit) -> Reading[None]:
    emit((yield from tape.run(BLANK)))


def _scalar(tape: Tape, emit: Emit, first: str) -> Reading[None]:
    if first == '"':
        yield from read_string(tape, emit)
    elif first and first in "-0123456789":
        number = yield from tape.run(NUMBER_CHARACTERS)
        if not NUMBER.fullmatch(number):
            raise NoCall
        emit(number)
    elif first:
        word = yield from tape.run(WORD)
        if word not in ("true", "false", "null"):
            raise NoCall
        emit(word)
    else:
        raise Ended


def read_string(tape: Tape, emit: Emit) -> Reading[None]:
    """Reads one string with its quotation marks."""
    emit((yield from tape.expect('"')))
    while True:
        emit(tape.take(PLAIN))
        character = yield from tape.peek()
        if character == '"':
            tape.skip(1)
            emit(character)
            return
        if character == "\\":
            yield from _escape(tape, emit)
        elif not character:
            raise Ended
        elif not PLAIN.fullmatch(character):
            raise NoCall


def _escape(tape: Tape, emit: Emit) -> Reading[None]:
    tape.skip(1)
    kind = yield from tape.char()
    escape = "\\" + kind
    if kind == "u":
        for _ in range(4):
            escape += yield from tape.char()
        if not HEX.issuperset(escape[2:]):
            raise NoCall
    elif kind not in '"\\/bfnrt':
        raise NoCall
    emit(escape)


def read_text(tape: Tape) -> Reading[str]:
    """Reads a string and answers with what it says. Raises NoCall where that is no text: half a character."""
    parts: list[str] = []
    yield from read_string(tape, parts.append)
    text: str = json.loads("".join(parts))
    if not text.isascii() and SURROGATE.search(text):
        raise NoCall
    return text


def as_json(text: str) -> str:
    """The text as it stands between a JSON string's quotation marks. Of a text in parts, the parts give the same."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
