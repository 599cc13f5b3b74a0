"""Parses one output while it arrives: reasoning first, then text and tool calls."""

from __future__ import annotations

from typing import NamedTuple, cast, get_args

from services.gateway.parsing.dialects.harmony import HarmonyReader
from services.gateway.parsing.dialects.reader import format_reader
from services.gateway.parsing.events import ParseEvent, ParseEvents, ToolCallFormat
from services.gateway.parsing.output_dialect import NO_SCHEMAS, OutputDialect, Schemas
from services.gateway.parsing.plugin_parsers import PluginCalls, read_plugin_reasoning
from services.gateway.parsing.reasoning import read_reasoning
from services.gateway.parsing.text_cursor import NotAToolCall, OutputEnd, Reading, TextCursor, marker_set
from shared.messages.dialects import ReasoningFormat, Thinking, ToolFormat
from shared.messages.generation import FinishReason


class ParserOptions(NamedTuple):
    """How to parse the outputs of one request."""

    dialect: OutputDialect
    """Its `tools` is None where no calls are looked for."""
    schemas: Schemas = NO_SCHEMAS
    parallel_calls: bool = True
    """False: every call after the first is dropped."""
    include_reasoning: bool = True
    """False: reasoning is dropped."""
    continued: bool = False
    """Whether the prompt ends with the beginning of the answer, or of its reasoning, which the output goes on with."""
    custom: frozenset[str] = frozenset()
    """Names of tools whose calls the client sees as one text in place of arguments."""


class OutputParser:
    """Owns what has arrived of one output and is not decided yet.

    However the text is split into deltas, the events are the same, except for where texts and arguments are divided.
    """

    def __init__(self, options: ParserOptions) -> None:
        self._cursor = TextCursor()
        self._events = ParseEvents(parallel_calls=options.parallel_calls, include_reasoning=options.include_reasoning)
        self._options = options
        self._reading: Reading[None] | None = None
        self._tokens = 0
        """Tokens of which it is not known yet what they are part of."""
        self.reasoning_tokens = 0
        """Tokens of the reasoning, left out or not; the mark that opens it counts, the one that closes it does not."""
        self.thinking: Thinking | None = None
        """Whether the prompt ends inside the reasoning; to be set before the first text."""

    @property
    def separates_reasoning(self) -> bool:
        """Whether reasoning is told from the rest."""
        return self._options.dialect.reasoning is not None

    def record_tokens(self, count: int) -> None:
        """Notes of how many tokens the next text is; to be called before it is fed."""
        self._tokens += count

    def feed(self, text: str) -> list[ParseEvent]:
        """Returns what is decided now that this text has arrived."""
        self._cursor.feed(text)
        return self._advance()

    def finish(self, *, truncated: bool) -> list[ParseEvent]:
        """Returns the remaining events. `truncated`: the output reached its length limit, so an unfinished call
        counts as one."""
        self._cursor.close(truncated=truncated)
        return self._advance()

    def read(self, text: str, finish: FinishReason | None) -> list[ParseEvent]:
        """Returns what is decided now that this text has arrived, and with `finish` all that remains."""
        events = self.feed(text)
        if finish is not None:
            events += self.finish(truncated=finish != "stop")
        return events

    def _advance(self) -> list[ParseEvent]:
        if self._reading is None:
            self._reading = self._read()
        next(self._reading, None)
        self._count_reasoning()
        return self._events.drain()

    def _count_reasoning(self) -> None:
        """Counts a token as reasoning if its text is reasoning; if one step brought both kinds, divides its tokens by
        the share of characters."""
        reasoning, others = self._events.take_characters()
        if reasoning or others:
            self.reasoning_tokens += round(self._tokens * reasoning / (reasoning + others))
            self._tokens = 0

    def _read(self) -> Reading[None]:
        cursor, events = self._cursor, self._events
        dialect = self._options.dialect
        if dialect.has_channels:
            functions = None if dialect.tools is None else self._options.schemas
            messages = HarmonyReader(
                cursor, events, functions=functions, separate_reasoning=dialect.reasoning is not None
            )
            yield from messages.read(continued=self.thinking is not None)
        elif dialect.reasoning is not None and not (self._options.continued and self.thinking == "closed"):
            # Else white space at the start, which is dropped behind reasoning, stands between two words of the answer.
            if dialect.plugin_marks is not None:
                yield from read_plugin_reasoning(dialect.reasoning, cursor, events, self.thinking)
            else:
                yield from read_reasoning(cursor, events, cast(ReasoningFormat, dialect.reasoning), self.thinking)
        if dialect.tools is not None and not dialect.has_channels:
            yield from ContentReader(cursor, events, _format_reader(dialect.tools, self._options.schemas)).read()
        while True:
            events.content(cursor.unread)
            cursor.skip(len(cursor.unread))
            cursor.mark()
            yield


def _format_reader(form: str, schemas: Schemas) -> ToolCallFormat:
    if form in get_args(ToolFormat):
        return format_reader(cast(ToolFormat, form), schemas)
    return PluginCalls(form, schemas)


class ContentReader:
    """Separates an answer's text from its tool calls, and treats as text what only looks like a call.

    White space before a call belongs to the call, and so does white space after it unless text follows.
    """

    def __init__(self, cursor: TextCursor, events: ParseEvents, form: ToolCallFormat) -> None:
        self._cursor, self._events, self._format = cursor, events, form
        self._openings = form.openings
        self._markers = marker_set((*self._openings.anywhere, *self._openings.line_start))
        self._no_text_yet = True
        """Whether no text has come yet, or none since the last call."""
        self._called = False

    def read(self) -> Reading[None]:
        """Reads to the end of the output."""
        while (yield from self._up_to_call()):
            yield from self._read_calls()

    def _up_to_call(self) -> Reading[bool]:
        """Emits text up to the white space before the next opening. Returns False at the output's end."""
        cursor = self._cursor
        while True:
            rest = cursor.unread
            opening = self._find_opening(rest)
            if opening is not None:
                self._emit_text(_stripped_length(rest, opening))
                return True
            if cursor.closed:
                if self._called and self._no_text_yet and not rest.strip():
                    cursor.skip(len(rest))
                else:
                    self._emit_text(len(rest))
                return False
            self._emit_text(_stripped_length(rest, len(rest) - self._markers.partial_length(rest)))
            yield

    def _find_opening(self, rest: str) -> int | None:
        for match in self._markers.pattern.finditer(rest):
            if match[0] in self._openings.anywhere or self._starts_line(rest, match.start()):
                return match.start()
        return None

    def _starts_line(self, rest: str, at: int) -> bool:
        stripped = _stripped_length(rest, at)
        return "\n" in rest[stripped:at] or (stripped == 0 and self._no_text_yet)

    def _emit_text(self, length: int) -> None:
        if length:
            self._events.content(self._cursor.unread[:length])
            self._cursor.skip(length)
            self._no_text_yet = False
        self._cursor.mark()

    def _read_calls(self) -> Reading[None]:
        cursor, events = self._cursor, self._events
        try:
            yield from cursor.skip_whitespace()
            yield from self._format.read(cursor, events)
        except NotAToolCall as reason:
            if events.in_call and isinstance(reason, OutputEnd) and cursor.truncated:
                events.end_call()
            elif cursor.since_mark:
                if events.in_call:
                    events.retract_call()
                events.content(cursor.since_mark)
                cursor.mark()
                self._no_text_yet = False
                return
        self._called = self._no_text_yet = True


def _stripped_length(text: str, end: int) -> int:
    """The length of `text[:end]` without its trailing white space."""
    return len(text[:end].rstrip())
