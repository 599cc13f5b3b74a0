"""Parsers that installed packages bring: found by entry points, and kept from harming more than their request."""

from __future__ import annotations

from collections.abc import Generator
from functools import cache
from typing import get_args

from services.gateway.parsing.call_templates import CallTemplate
from services.gateway.parsing.events import CallOpenings, ParseEvents
from services.gateway.parsing.interface import ReasoningParser, ToolParser
from services.gateway.parsing.output_dialect import Schemas
from services.gateway.parsing.text_cursor import NotAToolCall, OutputEnd, Reading, TextCursor
from shared.messages.dialects import (
    REASONING_ALIASES,
    TOOL_ALIASES,
    ReasoningFormat,
    Thinking,
    ThinkingMarks,
    ToolFormat,
)
from shared.plugins.entry_points import PluginError, load_class

TOOL_PARSERS = "baton.tool_parsers"
REASONING_PARSERS = "baton.reasoning_parsers"
BUILT_IN_TOOLS = ("auto", "none", *get_args(ToolFormat), *TOOL_ALIASES)
"""The values of the setting that no package may take."""
BUILT_IN_REASONING = ("auto", "none", *get_args(ReasoningFormat), *REASONING_ALIASES)


class ParserFailed(Exception):
    """A plug-in has not read an output as it must; the text says which and why."""


@cache
def tool_parser(name: str) -> type[ToolParser]:
    """The class of the plug-in of that name. Raises PluginError where it is none, or says of itself what cannot be."""
    found, where = load_class(TOOL_PARSERS, name, ToolParser, built_in=BUILT_IN_TOOLS)
    openings = getattr(found, "openings", None)
    texts = (*openings.anywhere, *openings.line_start) if isinstance(openings, CallOpenings) else ()
    try:
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError("openings: CallOpenings with one text or more is expected")
        if any(one != other and other.startswith(one) for one in texts for other in texts):
            raise ValueError("openings: no text may begin another one")
        if found.call_template:
            CallTemplate.parse(found.call_template)
    except ValueError as error:
        raise PluginError(f"{where}: {error}") from None
    return found


@cache
def reasoning_parser(name: str) -> type[ReasoningParser]:
    """The class of the plug-in of that name. Raises PluginError where it is none, or says of itself what cannot be."""
    found, where = load_class(REASONING_PARSERS, name, ReasoningParser, built_in=BUILT_IN_REASONING)
    marks = getattr(found, "marks", None)
    if not isinstance(marks, ThinkingMarks) or not all(isinstance(mark, str) and mark for mark in marks):
        raise PluginError(f"{where}: marks: ThinkingMarks with two texts is expected")
    return found


class PluginCalls:
    """Reads calls as a plug-in does, and checks that it keeps to what a format must. Implements
    `events.ToolCallFormat`."""

    def __init__(self, name: str, schemas: Schemas) -> None:
        self._name, self._schemas = name, schemas
        self.openings = tool_parser(name).openings

    def read(self, cursor: TextCursor, events: ParseEvents) -> Reading[None]:
        """See `ToolCallFormat`. Raises ParserFailed where the plug-in fails, or reads nothing."""
        began, checked = cursor.position, CheckedEvents(events)
        what = f"the tool parser {self._name}"
        try:
            parser = tool_parser(self._name)(self._schemas)
            yield from _guarded(parser.read(cursor, checked), cursor, what)
        except NotAToolCall:
            # Even one that has read nothing gets on: the opening's first character is text.
            cursor.skip(max(0, began + 1 - cursor.position))
            raise
        except ParserFailed:
            raise
        except Exception as error:
            raise ParserFailed(f"{what} failed: {error!r}") from error
        if cursor.position <= began:
            raise ParserFailed(f"{what} failed: it has read nothing, and raised no NotAToolCall")
        if events.in_call:
            raise ParserFailed(f"{what} failed: it has not ended its call")


def read_plugin_reasoning(
    name: str, cursor: TextCursor, events: ParseEvents, thinking: Thinking | None
) -> Reading[None]:
    """Reads the reasoning as the plug-in of that name does. Raises ParserFailed."""
    what = f"the reasoning parser {name}"
    try:
        reading = reasoning_parser(name)().read(cursor, CheckedEvents(events), thinking)
        yield from _guarded(reading, cursor, what)
    except OutputEnd:
        pass
    except ParserFailed:
        raise
    except Exception as error:
        raise ParserFailed(f"{what} failed: {error!r}") from error
    if events.in_call:
        raise ParserFailed(f"{what} failed: it has started a call")
    cursor.mark()


def _guarded(reading: Generator[None, None, None], cursor: TextCursor, what: str) -> Reading[None]:
    for _ in reading:
        if cursor.closed:
            raise ParserFailed(f"{what} failed: it waits for text behind the output's end")
        yield


class CheckedEvents(ParseEvents):
    """Passes on what a plug-in has read, and raises ValueError where the order of events cannot be."""

    def __init__(self, events: ParseEvents) -> None:
        super().__init__(parallel_calls=True, include_reasoning=True)
        self._target = events

    def content(self, text: str) -> None:
        """See `ParseEvents`."""
        self._expect(text, in_call=False)
        self._target.content(text)

    def reasoning(self, text: str) -> None:
        """See `ParseEvents`."""
        self._expect(text, in_call=False)
        self._target.reasoning(text)

    def start_call(self, name: str, identity: str | None = None) -> None:
        """See `ParseEvents`."""
        self._expect(name, in_call=False)
        if not name:
            raise ValueError("a call without a name")
        if identity is not None and not (isinstance(identity, str) and identity):
            raise ValueError(f"an id of a call is a text, not {identity!r:.80}")
        self.in_call = True
        self._target.start_call(name, identity)

    def arguments(self, text: str) -> None:
        """See `ParseEvents`."""
        self._expect(text, in_call=True)
        self._target.arguments(text)

    def end_call(self) -> None:
        """See `ParseEvents`."""
        self._expect("", in_call=True)
        self.in_call = False
        self._target.end_call()

    def retract_call(self) -> None:
        """See `ParseEvents`."""
        self._expect("", in_call=True)
        self.in_call = False
        self._target.retract_call()

    def _expect(self, text: str, *, in_call: bool) -> None:
        if not isinstance(text, str):
            raise ValueError(f"a text is expected, not {text!r:.80}")
        if self.in_call != in_call:
            raise ValueError("a call is open already" if self.in_call else "no call is open")
