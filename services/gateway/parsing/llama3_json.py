"""Llama 3's calls: `{"name": …, "parameters": {…}}`, alone or behind `<|python_tag|>`, several with `;` between."""

from __future__ import annotations

from collections.abc import Container

from services.gateway.parsing.call_object import read_call_object
from services.gateway.parsing.pieces import Pieces
from services.gateway.parsing.syntax import Openings
from services.gateway.parsing.tape import Reading, Tape

TAGS, END = ("<|python_tag|>", "<|python_start|>"), "<|python_end|>"


class Llama3Json:
    """Owns nothing. Without a tag nothing but its form shows that JSON is a call, so it must be of a function that the
    request has, and hold no more than a call does."""

    openings = Openings(anywhere=TAGS, line_start=("{",))

    def __init__(self, functions: Container[str]) -> None:
        self._functions = functions

    def read(self, tape: Tape, pieces: Pieces) -> Reading[None]:
        tag = yield from tape.ahead(TAGS)
        if tag is not None:
            yield from tape.expect(tag)
            yield from tape.space()
        while True:
            yield from read_call_object(tape, pieces, only=None if tag else self._functions)
            pieces.end()
            tape.mark()
            if not (yield from _another(tape)):
                break
        if tag is not None and (yield from tape.ahead((END,))):
            yield from tape.expect(END)
            tape.mark()


def _another(tape: Tape) -> Reading[bool]:
    """Whether `;` and one more object follow; read up to that object then, and nothing otherwise."""
    yield from tape.space()
    if (yield from tape.peek()) == ";":
        tape.skip(1)
        yield from tape.space()
        if (yield from tape.peek()) == "{":
            return True
    tape.rewind()
    return False
