"""The items of a response's output while it arrives: as events of a stream, and whole at the end."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Literal, assert_never, get_args

import msgspec

from services.gateway.api.chat import NewId, repeatable_ids
from services.gateway.api.custom_tools.custom_input import CustomInput
from services.gateway.api.logprobs import chat_logprobs
from services.gateway.api.responses.input_items import item_id
from services.gateway.api.responses.tools import CallKind, CallTarget
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
from shared.messages.gateway import PositionLogprobs
from shared.messages.generation import FinishReason

Event = dict[str, Any]
ItemKind = Literal["message", "reasoning"] | CallKind
ItemStatus = Literal["in_progress", "completed", "incomplete"]

_PREFIXES: dict[ItemKind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_DELTAS: dict[ItemKind, str] = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
_CALLS = get_args(CallKind)
_encode = msgspec.json.Encoder().encode


class OutputItem:
    """One item, as far as it has arrived."""

    def __init__(self, kind: ItemKind, index: int, response: str, named: dict[str, str]) -> None:
        """`index`: its number in the output of `response`. `named`: the name, namespace and id of a call."""
        self.kind: ItemKind = kind
        self.id = item_id(_PREFIXES[kind], response, index)
        self._index, self._named = index, named
        self._status: ItemStatus = "in_progress"
        self._pieces: list[str] = []
        self._logprobs: list[msgspec.Raw] = []
        """As JSON, made as they come: several events at the end have all of them, which would hold up other streams."""
        self._input = CustomInput() if kind == "custom_tool_call" else None

    def begin(self) -> list[Event]:
        """Returns the events with which it begins, before anything was added."""
        added = [self._event("response.output_item.added", item=self._fields([], ""))]
        if self.kind in _CALLS:
            return added
        return [*added, self._content_event("response.content_part.added", part=self._part(""))]

    def add(self, text: str, logprobs: list[PositionLogprobs]) -> list[Event]:
        """Appends what has arrived."""
        if self._input is not None:
            text = self._input.feed(text)
        self._pieces.append(text)
        if self.kind in _CALLS:
            return [self._event(f"{_DELTAS[self.kind]}.delta", item_id=self.id, delta=text)] if text else []
        event = self._content_event(f"{_DELTAS[self.kind]}.delta", delta=text)
        if self.kind == "message":
            event["logprobs"] = [msgspec.Raw(_encode(each)) for each in chat_logprobs(logprobs)["content"]]
            self._logprobs += event["logprobs"]
        return [event]

    def end(self, *, cut_off: bool) -> list[Event]:
        """Returns the events with which it ends. `cut_off`: before its time."""
        self._status = "incomplete" if cut_off else "completed"
        if self._input is not None and (rest := self._input.rest()):
            self._pieces.append(rest)
            delta = self._event(f"{_DELTAS[self.kind]}.delta", item_id=self.id, delta=rest)
            self._input = None
            return [delta, *self.end(cut_off=cut_off)]
        text, done = "".join(self._pieces), f"{_DELTAS[self.kind]}.done"
        last = self._event("response.output_item.done", item=self.body())
        match self.kind:
            case "function_call":
                return [self._event(done, item_id=self.id, name=self._named["name"], arguments=text), last]
            case "custom_tool_call":
                return [self._event(done, item_id=self.id, input=text), last]
            case _:
                pass
        ended = self._content_event(done, text=text)
        if self.kind == "message":
            ended["logprobs"] = list(self._logprobs)
        return [ended, self._content_event("response.content_part.done", part=self._part(text)), last]

    def body(self) -> dict[str, Any]:
        """Returns it whole."""
        text = "".join(self._pieces)
        return self._fields([] if self.kind in _CALLS else [self._part(text)], text)

    def _fields(self, content: list[dict[str, Any]], text: str) -> dict[str, Any]:
        named = {"id": self.id, "type": self.kind, "status": self._status}
        match self.kind:
            case "message":
                return {**named, "role": "assistant", "content": content}
            case "reasoning":
                return {**named, "summary": [], "content": content, "encrypted_content": None}
            case "function_call":
                return {**named, **self._named, "arguments": text}
            case "custom_tool_call":
                return {**named, **self._named, "input": text}

    def _part(self, text: str) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "output_index": self._index, **fields}

    def _content_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self.id, content_index=0, **fields)


class OutputItems:
    """Owns an answer's items. Text between them that is only white space is left out."""

    def __init__(self, options: ParserOptions | None) -> None:
        """`options`: how the output is read; None: it is nothing but text."""
        self.parser = OutputParser(options or ParserOptions(OutputDialect()))
        self.name = secrets.token_hex(24)
        """The response's id, so that items have the same ids where another gateway makes them again."""
        self.targets: Mapping[str, CallTarget] = {}
        """What the client calls functions, but for plain ones."""
        self._new_call: NewId | None = None
        self._mistral = options is not None and options.dialect.tools == "mistral"
        self._parsed = options is not None
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._blank = ""
        """White space that is part of a text only if more of it follows."""
        self._started = 0
        """Items that a stream has begun, retracted ones included."""
        self._logprobs: list[PositionLogprobs] = []
        """Of tokens of which it is not known yet what they are part of."""

    def record(self, logprobs: tuple[PositionLogprobs, ...] | None) -> None:
        """Notes what the next text is made of; to be called before each `feed`."""
        self._logprobs += logprobs or ()

    def feed(self, text: str, finish: FinishReason | None) -> list[Event]:
        """Returns the events of new output; none where nothing is decided yet."""
        events: list[Event] = []
        self._add_all(self.parser.feed(text), events, cut_off=False)
        if finish is not None:
            cut_off = finish != "stop"
            self._add_all(self.parser.finish(truncated=cut_off), events, cut_off=cut_off)
            if not self._items and self._blank:
                self._begin("message", events)
                self._append(self._blank, events)
            self._close(events, cut_off=cut_off)
        return events

    def finish_reason(self, reason: FinishReason) -> str:
        """Returns whether the output stopped after a call of a tool, or the reason."""
        called = any(item.kind in _CALLS for item in self._items)
        return "tool_calls" if called and reason == "stop" else reason

    def body(self) -> list[dict[str, Any]]:
        """Returns the response's `output`."""
        return [item.body() for item in self._items]

    def _add_all(self, parsed: list[ParseEvent], events: list[Event], *, cut_off: bool) -> None:
        for each in parsed:
            self._add(each, events, cut_off=cut_off)

    def _add(self, event: ParseEvent, events: list[Event], *, cut_off: bool) -> None:
        match event:
            case ContentText(text):
                self._extend("message", text, events)
            case ReasoningText(text):
                self._extend("reasoning", text, events)
            case ToolCallStart(name, identity):
                self._new_call = self._new_call or repeatable_ids(self.name, self._mistral)
                target = self.targets.get(name, CallTarget("function_call", name))
                named = {"call_id": identity or self._new_call(), "name": target.name}
                if target.namespace is not None:
                    named["namespace"] = target.namespace
                self._begin(target.kind, events, named)
            case ToolCallArguments(text):
                self._append(text, events)
            case ToolCallRetraction():
                retracted = self._open
                self._close(events, cut_off=True)
                self._items = [item for item in self._items if item is not retracted]
            case ToolCallEnd():
                self._close(events, cut_off=cut_off)
            case _:
                assert_never(event)

    def _extend(self, kind: ItemKind, text: str, events: list[Event]) -> None:
        if self._open is None or self._open.kind != kind:
            self._close(events)
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
            if self._parsed:
                self._logprobs = _last_of(self._logprobs, len(text.encode()))
            self._begin(kind, events)
        self._append(text, events)

    def _begin(self, kind: ItemKind, events: list[Event], named: dict[str, str] | None = None) -> None:
        self._close(events)
        self._open = OutputItem(kind, self._started, self.name, named or {})
        self._started += 1
        self._items.append(self._open)
        events += self._open.begin()

    def _append(self, text: str, events: list[Event]) -> None:
        assert self._open is not None
        events += self._open.add(text, self._logprobs)
        self._blank, self._logprobs = "", []

    def _close(self, events: list[Event], *, cut_off: bool = False) -> None:
        if self._open is not None:
            events += self._open.end(cut_off=cut_off)
            self._open, self._blank = None, ""


def _last_of(positions: list[PositionLogprobs], size: int) -> list[PositionLogprobs]:
    """The last positions, those that make a text of `size` bytes: marks came before it."""
    for i, position in reversed(list(enumerate(positions))):
        if size <= 0:
            return positions[i + 1 :]
        size -= len(position.chosen.raw)
    return positions
