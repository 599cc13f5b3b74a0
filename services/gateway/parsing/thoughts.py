"""Thoughts at an output's beginning, between the marks of `THINKING_MARKS`."""

from __future__ import annotations

from services.gateway.parsing.pieces import Pieces
from services.gateway.parsing.tape import Emit, Ended, Reading, Tape
from shared.dialects import THINKING_MARKS, ReasoningFormat, Thinking


def read_thoughts(tape: Tape, pieces: Pieces, form: ReasoningFormat, thinking: Thinking | None) -> Reading[None]:
    """Reads up to where the answer begins. The marks, and white space beside them, are part of neither.

    `thinking`: how the prompt ends. Where it shows nothing, deepseek_r1 takes all up to the end's mark for thoughts,
    the others only what is marked as such.
    """
    marks = THINKING_MARKS[form]
    if thinking != "closed":
        yield from tape.space()
        marked = yield from tape.ahead((marks.start,))
        if marked is None and thinking != "open" and form != "deepseek_r1":
            tape.rewind()
            return
        if marked is not None:
            yield from tape.expect(marks.start)
            yield from tape.space()
        try:
            yield from tape.until((marks.end,), _WithoutEnd(pieces.reasoning).feed)
        except Ended:
            return
        yield from tape.expect(marks.end)
    yield from tape.space()
    tape.mark()


class _WithoutEnd:
    """Owns white space that is only passed on when more follows."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held = ""

    def feed(self, text: str) -> None:
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        if kept:
            self._emit(kept)
