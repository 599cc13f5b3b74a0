"""A call that is a JSON object: `{"name": …, "arguments": {…}}`, the keys in any order."""

from __future__ import annotations

from collections.abc import Container

from services.gateway.parsing.json_text import read_text, read_value
from services.gateway.parsing.pieces import Pieces
from services.gateway.parsing.tape import NoCall, Reading, Tape

ARGUMENT_KEYS = ("arguments", "parameters")
TOLERATED_KEYS = ("id", "type")


def read_call_object(
    tape: Tape, pieces: Pieces, *, only: Container[str] | None = None, other_keys: bool = False
) -> Reading[None]:
    """Reads one whole call, up to its end. Raises NoCall.

    The call begins when its name is known and its arguments have begun. `only`: names that a call may have, where
    nothing but its form shows that it is one. `other_keys`: whether the object may hold more, which is left out.
    """
    yield from tape.expect("{")
    name: str | None = None
    waiting: list[str] | None = None
    """Arguments that came before the name."""
    while True:
        yield from tape.space()
        key = yield from read_text(tape)
        yield from tape.space()
        yield from tape.expect(":")
        yield from tape.space()
        if key == "name" and name is None:
            name = yield from _name(tape, only)
            if waiting is not None:
                pieces.begin(name)
                pieces.arguments("".join(waiting))
        elif key in ARGUMENT_KEYS and waiting is None:
            waiting = yield from _arguments(tape, pieces, name)
        elif key in TOLERATED_KEYS or (other_keys and key not in ("name", *ARGUMENT_KEYS)):
            yield from read_value(tape, _left_out)
        else:
            raise NoCall
        yield from tape.space()
        if (yield from tape.expect(",", "}")) == "}":
            break
    if not pieces.calling:
        raise NoCall


def _name(tape: Tape, only: Container[str] | None) -> Reading[str]:
    name = yield from read_text(tape)
    if not name or (only is not None and name not in only):
        raise NoCall
    return name


def _arguments(tape: Tape, pieces: Pieces, name: str | None) -> Reading[list[str]]:
    """Reads an object: as the call's arguments where the name is known, else into the answer."""
    if (yield from tape.peek()) != "{":
        raise NoCall
    early: list[str] = []
    if name is not None:
        pieces.begin(name)
        yield from read_value(tape, pieces.arguments)
    else:
        yield from read_value(tape, early.append)
    return early


def _left_out(text: str) -> None:
    """A value that is no part of the call."""
