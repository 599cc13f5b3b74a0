"""The parts of an answer while it arrives, for APIs whose streams open and close them: texts, reasoning and calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, Literal, Protocol, TypeVar, assert_never

from services.gateway.parsing.events import (
    ContentText,
    ParseEvent,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallRetraction,
    ToolCallStart,
)
from services.gateway.parsing.output_dialect import OutputDialect
from services.gateway.parsing.output_parser import OutputParser, ParserOptions
from shared.messages.generation import FinishReason

Event = dict[str, Any]
TextKind = Literal["text", "reasoning"]


class AnswerPart(Protocol):
    """One part, as far as it has arrived, in the shape of one API."""

    def begin(self) -> list[Event]:
        """Returns the events with which it begins, before anything was added."""

    def add(self, text: str) -> list[Event]:
        """Appends what has arrived."""

    def end(self, *, cut_off: bool) -> list[Event]:
        """Returns the events with which it ends. `cut_off`: before its time."""


Part = TypeVar("Part", bound=AnswerPart)


class AnswerParts(ABC, Generic[Part]):
    """Owns an answer's parts, one of which is open at a time. White space alone between two of them is left out."""

    keeps_blank = False
    """Whether an answer that is nothing but white space has a part."""

    def __init__(self, options: ParserOptions | None) -> None:
        """`options`: how the output is read; None: it is nothing but text."""
        self.parser = OutputParser(options or ParserOptions(OutputDialect()))
        self._mistral = options is not None and options.dialect.tools == "mistral"
        self._parts: list[Part] = []
        self._calls = 0
        """How many of the parts are calls."""
        self._started = 0
        """Parts that a stream has begun, retracted calls included."""
        self._open: Part | None = None
        self._kind: TextKind | None = None
        """Of the open text, or of `_blank`."""
        self._blank = ""
        """White space that is part of a text only if more of it follows."""

    def feed(self, text: str, finish: FinishReason | None) -> list[Event]:
        """Returns the events of new output; none where nothing is decided yet."""
        events: list[Event] = []
        for each in self.parser.feed(text):
            self._read(each, events, cut_off=False)
        if finish is not None:
            cut_off = finish != "stop"
            for each in self.parser.finish(truncated=cut_off):
                self._read(each, events, cut_off=cut_off)
            if self.keeps_blank and self._blank and not self._parts:
                self._begin(self._new_text("text", self._blank), events)
                self._append(self._blank, events)
            self._close(events, cut_off=cut_off)
        return events

    def finish_reason(self, reason: FinishReason) -> str:
        """Returns whether the output stopped after a call of a tool, or the reason."""
        return "tool_calls" if self._calls and reason == "stop" else reason

    @abstractmethod
    def _new_text(self, kind: TextKind, text: str) -> Part:
        """Makes a part that begins with `text`, which is added to it."""

    @abstractmethod
    def _new_call(self, name: str, identity: str | None) -> Part:
        """Makes a call. `identity`: its id, where the model writes one."""

    def _read(self, event: ParseEvent, events: list[Event], *, cut_off: bool) -> None:
        match event:
            case ContentText(text):
                self._extend("text", text, events)
            case ReasoningText(text):
                self._extend("reasoning", text, events)
            case ToolCallStart(name, identity):
                self._close(events)
                self._begin(self._new_call(name, identity), events)
                self._calls += 1
            case ToolCallArguments(text):
                self._append(text, events)
            case ToolCallRetraction():
                self._close(events, cut_off=True)
                self._parts.pop()
                self._calls -= 1
            case ToolCallEnd():
                self._close(events, cut_off=cut_off)
            case _:
                assert_never(event)

    def _extend(self, kind: TextKind, text: str, events: list[Event]) -> None:
        if self._kind != kind:
            self._close(events)
            self._kind = kind
        if self._open is None:
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
            self._begin(self._new_text(kind, text), events)
        self._append(text, events)

    def _begin(self, part: Part, events: list[Event]) -> None:
        self._open = part
        self._parts.append(part)
        self._started += 1
        events += part.begin()

    def _append(self, text: str, events: list[Event]) -> None:
        assert self._open is not None
        events += self._open.add(text)

    def _close(self, events: list[Event], *, cut_off: bool = False) -> None:
        if self._open is not None:
            events += self._open.end(cut_off=cut_off)
        self._open, self._kind, self._blank = None, None, ""
