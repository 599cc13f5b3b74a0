"""What a parsed output consists of, and what each format of tool calls offers to the parser."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Protocol

from services.gateway.parsing.text_cursor import Reading, TextCursor


class ContentText(NamedTuple):
    """Text of the answer."""

    text: str


class ReasoningText(NamedTuple):
    """Reasoning, without the marks around it."""

    text: str


class ToolCallStart(NamedTuple):
    """A call of the function `name` starts. All `ToolCallArguments` up to its end belong to it."""

    name: str
    identity: str | None = None
    """The call's id where the model writes one, which its chat template expects again. Otherwise one is drawn."""


class ToolCallArguments(NamedTuple):
    """More of the open call's arguments. Joined, the texts of one call are the JSON of an object."""

    text: str


class ToolCallEnd(NamedTuple):
    """The open call is complete, or the output's length limit has cut it off."""


class ToolCallRetraction(NamedTuple):
    """The open call turned out to be ordinary text, which follows unchanged as `ContentText`."""


def arguments_object(text: str) -> dict[str, Any]:
    """Returns a call's arguments, given their JSON. An empty object where an output's limit has cut them off."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


ParseEvent = ContentText | ReasoningText | ToolCallStart | ToolCallArguments | ToolCallEnd | ToolCallRetraction


class ParseEvents:
    """Owns the events that were read and not yet drained. Adjacent texts of one kind are joined."""

    def __init__(self, *, parallel_calls: bool, include_reasoning: bool) -> None:
        self._events: list[ParseEvent] = []
        self._parallel_calls = parallel_calls
        """Whether more than one call is allowed; the others are dropped otherwise."""
        self._include_reasoning = include_reasoning
        self._dropping = False
        self._finished_calls = 0
        self.in_call = False
        """Whether a call has started and not ended."""
        self._reasoning_read = self._others_read = 0
        """Characters."""

    def take_characters(self) -> tuple[int, int]:
        """Returns how many characters of reasoning, and of the answer and calls, were read since the last call, what
        the client does not get included."""
        taken = self._reasoning_read, self._others_read
        self._reasoning_read = self._others_read = 0
        return taken

    def drain(self) -> list[ParseEvent]:
        """Returns all events since the last drain, and forgets them."""
        drained, self._events = self._events, []
        return drained

    def content(self, text: str) -> None:
        """Adds text of the answer; an empty text adds nothing."""
        if not text:
            return
        self._others_read += len(text)
        if self._events and isinstance(last := self._events[-1], ContentText):
            self._events[-1] = ContentText(last.text + text)
        else:
            self._events.append(ContentText(text))

    def reasoning(self, text: str) -> None:
        """Adds reasoning, unless the client wants it left out."""
        self._reasoning_read += len(text)
        if not text or not self._include_reasoning:
            return
        if self._events and isinstance(last := self._events[-1], ReasoningText):
            self._events[-1] = ReasoningText(last.text + text)
        else:
            self._events.append(ReasoningText(text))

    def start_call(self, name: str, identity: str | None = None) -> None:
        """Opens a call of the function `name`. `identity`: its id, where the model writes one."""
        self.in_call = True
        self._others_read += len(name)
        self._dropping = self._finished_calls > 0 and not self._parallel_calls
        self._add(ToolCallStart(name, identity))

    def arguments(self, text: str) -> None:
        """Adds a piece of the open call's arguments, which is JSON."""
        self._others_read += len(text)
        if text and self._events and isinstance(last := self._events[-1], ToolCallArguments) and not self._dropping:
            self._events[-1] = ToolCallArguments(last.text + text)
        elif text:
            self._add(ToolCallArguments(text))

    def end_call(self) -> None:
        """Closes the open call."""
        self.in_call = False
        self._finished_calls += 1
        self._add(ToolCallEnd())

    def retract_call(self) -> None:
        """Takes the open call back: its text was no call."""
        self.in_call = False
        self._add(ToolCallRetraction())

    def _add(self, event: ParseEvent) -> None:
        if not self._dropping:
            self._events.append(event)


class CallOpenings(NamedTuple):
    """Texts with which a call may start. None of them may be a prefix of another."""

    anywhere: tuple[str, ...] = ()
    line_start: tuple[str, ...] = ()
    """Count only where nothing but white space precedes them in their line."""


class ToolCallFormat(Protocol):
    """One format of tool calls. Holds no state of an output."""

    openings: CallOpenings

    def read(self, cursor: TextCursor, events: ParseEvents) -> Reading[None]:
        """Reads one call or several, from an opening on, and marks the cursor after each complete call.

        Raises NotAToolCall: what was read since the cursor's mark is text then.
        """
