"""Calls as Python writes them, in a list: `[f(a=1), g(b="x")]`."""

from __future__ import annotations

import re
from collections.abc import Collection

from services.gateway.parsing.json_text import as_json
from services.gateway.parsing.pieces import Pieces
from services.gateway.parsing.python_value import read_python_value
from services.gateway.parsing.syntax import Openings
from services.gateway.parsing.tape import NoCall, Reading, Tape

TAG, END = "<|python_start|>", "<|python_end|>"
NAME = re.compile(r"[^\s\[\](){},='\"]*")


class Pythonic:
    """Owns nothing. As a list in brackets may be anything, it must begin with a function that the request has."""

    def __init__(self, functions: Collection[str]) -> None:
        self._functions = functions
        self.openings = Openings(anywhere=(TAG,), line_start=tuple(f"[{name}(" for name in functions))

    def read(self, tape: Tape, pieces: Pieces) -> Reading[None]:
        tagged = (yield from tape.ahead((TAG,))) is not None
        if tagged:
            yield from tape.expect(TAG)
            yield from tape.space()
        yield from tape.expect("[")
        while True:
            yield from tape.space()
            yield from self._read_call(tape, pieces)
            pieces.end()
            tape.mark()
            yield from tape.space()
            if not (yield from tape.peek()) or (yield from tape.expect(",", "]")) == "]":
                break
        if tagged and (yield from tape.ahead((END,))):
            yield from tape.expect(END)
        tape.mark()

    def _read_call(self, tape: Tape, pieces: Pieces) -> Reading[None]:
        name = yield from tape.run(NAME)
        yield from tape.expect("(")
        if name not in self._functions:
            raise NoCall
        yield from tape.space()
        keys: set[str] = set()
        while (yield from tape.peek()) != ")":
            yield from _read_argument(tape, pieces, name, keys)
            yield from tape.space()
            if (yield from tape.peek()) != ")":
                yield from tape.expect(",")
                yield from tape.space()
        yield from tape.expect(")")
        if not keys:
            pieces.begin(name)
        pieces.arguments("}" if keys else "{}")


def _read_argument(tape: Tape, pieces: Pieces, name: str, keys: set[str]) -> Reading[None]:
    """`key=value`. The call begins with its first."""
    key = yield from tape.run(NAME)
    yield from tape.space()
    yield from tape.expect("=")
    yield from tape.space()
    if not key or key in keys:
        raise NoCall
    if not keys:
        pieces.begin(name)
    pieces.arguments(f'{", " if keys else "{"}"{as_json(key)}": ')
    keys.add(key)
    yield from read_python_value(tape, pieces.arguments)
