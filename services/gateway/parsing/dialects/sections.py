"""Calls in a section of their own: a mark before all of them, one before each, and one behind all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from services.gateway.parsing.events import CallOpenings, ParseEvents
from services.gateway.parsing.text_cursor import Reading, TextCursor


class SectionMarks(NamedTuple):
    """The marks of a format's sections. None of them begins another one."""

    begin: tuple[str, ...]
    """Each of them begins a section."""
    call: str
    """Begins a call. It may come without a section."""
    end: tuple[str, ...]

    @property
    def openings(self) -> CallOpenings:
        """Where calls may start."""
        return CallOpenings(anywhere=(*self.begin, self.call))


def read_section(
    cursor: TextCursor, events: ParseEvents, marks: SectionMarks, read_call: Callable[[], Reading[None]]
) -> Reading[None]:
    """Reads a section, or calls without one. `read_call` reads each from behind its mark to its end. Raises
    NotAToolCall."""
    if (yield from cursor.expect(*marks.begin, marks.call)) != marks.call:
        yield from cursor.skip_whitespace()
        yield from cursor.expect(marks.call)
    while True:
        yield from read_call()
        events.end_call()
        cursor.mark()
        yield from cursor.skip_whitespace()
        found = yield from cursor.match_ahead((marks.call, *marks.end))
        if found is None:
            cursor.rewind()
            return
        yield from cursor.expect(found)
        if found != marks.call:
            cursor.mark()
            return


def expect_end(cursor: TextCursor, mark: str) -> Reading[None]:
    """Reads the mark behind a complete call; it may be missing at the output's end. Raises NotAToolCall."""
    yield from cursor.skip_whitespace()
    if (yield from cursor.peek()):
        yield from cursor.expect(mark)
