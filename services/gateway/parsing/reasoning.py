"""Reads the reasoning at the start of an output, between the marks of `THINKING_MARKS`."""

from __future__ import annotations

from services.gateway.parsing.events import ParseEvents
from services.gateway.parsing.text_cursor import Emit, OutputEnd, Reading, TextCursor
from shared.messages.dialects import THINKING_MARKS, ReasoningFormat, Thinking, ThinkingMarks

VARIANTS: dict[ReasoningFormat, tuple[ThinkingMarks, ...]] = {
    "granite": (ThinkingMarks("Here's my thought process:", "Here's my response:"),)
}
"""Marks that models write as well, rounded ones at times."""

CALL_ENDS: dict[ReasoningFormat, tuple[str, ...]] = {"kimi_k2": ("<|tool_calls_section_begin|>",)}
"""What ends the reasoning and belongs to the answer."""


def read_reasoning(
    cursor: TextCursor, events: ParseEvents, form: ReasoningFormat, thinking: Thinking | None
) -> Reading[None]:
    """Reads up to where the answer starts. The marks, and white space beside them, belong to neither part.

    `thinking` says how the prompt ends. Where it is None, deepseek_r1 takes everything up to the end mark for
    reasoning, and the other formats only what is marked.
    """
    marks = (THINKING_MARKS[form], *VARIANTS.get(form, ()))
    before = CALL_ENDS.get(form, ())
    yield from _read(cursor, events, marks, before, thinking, starts_open=form == "deepseek_r1")


def read_marked(
    cursor: TextCursor, events: ParseEvents, marks: ThinkingMarks, thinking: Thinking | None, *, starts_open: bool
) -> Reading[None]:
    """Like `read_reasoning`, for any marks. `starts_open`: everything up to the end mark is reasoning where `thinking`
    is None."""
    yield from _read(cursor, events, (marks,), (), thinking, starts_open=starts_open)


def _read(
    cursor: TextCursor,
    events: ParseEvents,
    marks: tuple[ThinkingMarks, ...],
    before: tuple[str, ...],
    thinking: Thinking | None,
    *,
    starts_open: bool,
) -> Reading[None]:
    """`before`: texts that end the reasoning like an end mark, and stay unread."""
    if thinking != "closed":
        yield from cursor.skip_whitespace()
        marked = yield from cursor.match_ahead(tuple(mark.start for mark in marks))
        if marked is None and thinking != "open" and not starts_open:
            cursor.rewind()
            return
        if marked is not None:
            yield from cursor.expect(marked)
            yield from cursor.skip_whitespace()
        ends = (*(mark.end for mark in marks), *before)
        try:
            end = yield from cursor.read_until(ends, _TrimmedEnd(events.reasoning).feed)
        except OutputEnd:
            return
        if end not in before:
            yield from cursor.expect(end)
    yield from cursor.skip_whitespace()
    cursor.mark()


class _TrimmedEnd:
    """Holds white space back until more text follows it."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held = ""

    def feed(self, text: str) -> None:
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        if kept:
            self._emit(kept)
