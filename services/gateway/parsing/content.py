"""Text with calls in it: finds where they begin, and takes for text what turns out to be none."""

from __future__ import annotations

from services.gateway.parsing.marks import marks_of
from services.gateway.parsing.pieces import Pieces
from services.gateway.parsing.syntax import Syntax
from services.gateway.parsing.tape import Ended, NoCall, Reading, Tape


class Content:
    """Owns the place in the text. White space before a call is the call's, and so is that behind it, unless text
    follows."""

    def __init__(self, tape: Tape, pieces: Pieces, syntax: Syntax) -> None:
        self._tape, self._pieces, self._syntax = tape, pieces, syntax
        self._openings = syntax.openings
        self._marks = marks_of((*self._openings.anywhere, *self._openings.line_start))
        self._fresh = True
        """Whether no text has come yet, or none since the last call."""
        self._called = False

    def read(self) -> Reading[None]:
        """Reads to the end of the output."""
        while (yield from self._up_to_call()):
            yield from self._read_calls()

    def _up_to_call(self) -> Reading[bool]:
        """Passes on text up to the white space before the next opening. False at the output's end."""
        tape = self._tape
        while True:
            rest = tape.rest
            opening = self._opening(rest)
            if opening is not None:
                self._text(_bare(rest, opening))
                return True
            if tape.closed:
                self._end(rest)
                return False
            self._text(_bare(rest, len(rest) - self._marks.begun(rest)))
            yield

    def _end(self, rest: str) -> None:
        if self._called and self._fresh and not rest.strip():
            self._tape.skip(len(rest))
        else:
            self._text(len(rest))

    def _opening(self, rest: str) -> int | None:
        for match in self._marks.pattern.finditer(rest):
            if match[0] in self._openings.anywhere or self._starts_line(rest, match.start()):
                return match.start()
        return None

    def _starts_line(self, rest: str, at: int) -> bool:
        bare = _bare(rest, at)
        return "\n" in rest[bare:at] or (bare == 0 and self._fresh)

    def _text(self, length: int) -> None:
        if length:
            self._pieces.content(self._tape.rest[:length])
            self._tape.skip(length)
            self._fresh = False
        self._tape.mark()

    def _read_calls(self) -> Reading[None]:
        tape, pieces = self._tape, self._pieces
        try:
            yield from tape.space()
            yield from self._syntax.read(tape, pieces)
        except NoCall as reason:
            if pieces.calling and isinstance(reason, Ended) and tape.cut:
                pieces.end()
            elif tape.since_mark:
                self._no_call()
                return
        self._called = self._fresh = True

    def _no_call(self) -> None:
        if self._pieces.calling:
            self._pieces.broken()
        self._pieces.content(self._tape.since_mark)
        self._tape.mark()
        self._fresh = False


def _bare(text: str, end: int) -> int:
    """Where the white space begins that stands before `end`."""
    return len(text[:end].rstrip())
