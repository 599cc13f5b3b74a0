"""Mistral's calls behind `[TOOL_CALLS]`: a JSON array of objects, or (newer) each call's name and its arguments."""

from __future__ import annotations

import re

from services.gateway.parsing.call_object import read_call_object
from services.gateway.parsing.json_text import read_value
from services.gateway.parsing.pieces import Pieces
from services.gateway.parsing.syntax import Openings
from services.gateway.parsing.tape import NoCall, Reading, Tape

START, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAME = re.compile(r"[^\s\[\]{}\"]*")


class Mistral:
    """Owns nothing."""

    openings = Openings(anywhere=(START,))

    def read(self, tape: Tape, pieces: Pieces) -> Reading[None]:
        yield from tape.expect(START)
        yield from tape.space()
        match (yield from tape.peek()):
            case "[":
                yield from _read_array(tape, pieces)
            case "{":
                yield from read_call_object(tape, pieces, other_keys=True)
                _finish(tape, pieces)
            case _:
                yield from _read_named(tape, pieces)


def _read_array(tape: Tape, pieces: Pieces) -> Reading[None]:
    yield from tape.expect("[")
    while True:
        yield from tape.space()
        yield from read_call_object(tape, pieces, other_keys=True)
        _finish(tape, pieces)
        yield from tape.space()
        if not (yield from tape.peek()) or (yield from tape.expect(",", "]")) == "]":
            tape.mark()
            return


def _read_named(tape: Tape, pieces: Pieces) -> Reading[None]:
    """`name{…}`, `name[ARGS]{…}`, `name[CALL_ID]…[ARGS]{…}`."""
    name = yield from tape.run(NAME)
    if (yield from tape.ahead((CALL_ID, ARGUMENTS))) == CALL_ID:
        yield from tape.expect(CALL_ID)
        yield from tape.run(NAME)
    if (yield from tape.ahead((ARGUMENTS,))):
        yield from tape.expect(ARGUMENTS)
    yield from tape.space()
    if not name or (yield from tape.peek()) != "{":
        raise NoCall
    pieces.begin(name)
    yield from read_value(tape, pieces.arguments)
    _finish(tape, pieces)


def _finish(tape: Tape, pieces: Pieces) -> None:
    pieces.end()
    tape.mark()
