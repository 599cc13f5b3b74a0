"""The items of a response's output while it arrives: as events of a stream, and whole at the end."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from services.gateway.api.chat import NewId, repeatable_ids
from services.gateway.api.custom_tools.custom_input import CustomInput
from services.gateway.api.logprobs import chat_logprobs
from services.gateway.api.responses.input_items import item_id
from services.gateway.api.responses.tools import CallKind, CallTarget
from services.gateway.parsing.answer_parts import AnswerParts, Event, TextKind
from services.gateway.parsing.output_parser import ParserOptions
from shared.messages.gateway import PositionLogprobs

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
        self.coming: list[PositionLogprobs] = []
        """Of the text that is added next."""
        self._input = CustomInput() if kind == "custom_tool_call" else None

    def begin(self) -> list[Event]:
        """Returns the events with which it begins, before anything was added."""
        added = [self._event("response.output_item.added", item=self._fields([], ""))]
        if self.kind in _CALLS:
            return added
        return [*added, self._content_event("response.content_part.added", part=self._part(""))]

    def add(self, text: str) -> list[Event]:
        """Appends what has arrived."""
        if self._input is not None:
            text = self._input.feed(text)
        self._pieces.append(text)
        if self.kind in _CALLS:
            return [self._event(f"{_DELTAS[self.kind]}.delta", item_id=self.id, delta=text)] if text else []
        event = self._content_event(f"{_DELTAS[self.kind]}.delta", delta=text)
        if self.kind == "message":
            event["logprobs"] = [msgspec.Raw(_encode(each)) for each in chat_logprobs(self.coming)["content"]]
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


class OutputItems(AnswerParts[OutputItem]):
    """Owns an answer's items."""

    keeps_blank = True

    def __init__(self, options: ParserOptions | None) -> None:
        super().__init__(options)
        self.name = secrets.token_hex(24)
        """The response's id, so that items have the same ids where another gateway makes them again."""
        self.targets: Mapping[str, CallTarget] = {}
        """What the client calls functions, but for plain ones."""
        self._new_id: NewId | None = None
        self._parsed = options is not None
        self._logprobs: list[PositionLogprobs] = []
        """Of tokens of which it is not known yet what they are part of."""

    def record(self, logprobs: tuple[PositionLogprobs, ...] | None) -> None:
        """Notes what the next text is made of; to be called before each `feed`."""
        self._logprobs += logprobs or ()

    def body(self) -> list[dict[str, Any]]:
        """Returns the response's `output`."""
        return [item.body() for item in self._parts]

    def _new_text(self, kind: TextKind, text: str) -> OutputItem:
        if self._parsed:
            self._logprobs = _last_of(self._logprobs, len(text.encode()))
        return OutputItem("message" if kind == "text" else kind, self._started, self.name, {})

    def _new_call(self, name: str, identity: str | None) -> OutputItem:
        self._new_id = self._new_id or repeatable_ids(self.name, self._mistral)
        target = self.targets.get(name, CallTarget("function_call", name))
        named = {"call_id": identity or self._new_id(), "name": target.name}
        if target.namespace is not None:
            named["namespace"] = target.namespace
        return OutputItem(target.kind, self._started, self.name, named)

    def _append(self, text: str, events: list[Event]) -> None:
        assert self._open is not None
        self._open.coming, self._logprobs = self._logprobs, []
        super()._append(text, events)


def _last_of(positions: list[PositionLogprobs], size: int) -> list[PositionLogprobs]:
    """The last positions, those that make a text of `size` bytes: marks came before it."""
    for i, position in reversed(list(enumerate(positions))):
        if size <= 0:
            return positions[i + 1 :]
        size -= len(position.chosen.raw)
    return positions
