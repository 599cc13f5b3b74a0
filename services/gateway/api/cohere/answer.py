"""Answers of `/v2/chat` while they arrive: as events of a stream, and whole at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, assert_never

from services.gateway.api.chat import mistral_id, openai_id
from services.gateway.api.encoding.lazy_json import LazyArray
from services.gateway.api.logprobs import MIN_LOGPROB
from services.gateway.api.response import ChoiceState, ResponseHeader
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
PartKind = Literal["text", "thinking"]
_FINISH = {"stop": "COMPLETE", "length": "MAX_TOKENS", "tool_calls": "TOOL_CALL", "abort": "ERROR"}


class CohereCall:
    """One call of a tool, as far as it has arrived."""

    def __init__(self, id: str, name: str) -> None:
        self._id, self._name = id, name
        self.arguments: list[str] = []

    def body(self) -> dict[str, Any]:
        """Returns it as it is shown."""
        function = {"name": self._name, "arguments": "".join(self.arguments)}
        return {"id": self._id, "type": "function", "function": function}


class CohereMessage:
    """Owns an answer's parts and calls. Text between them that is only white space is left out."""

    def __init__(self, options: ParserOptions | None) -> None:
        """`options`: how the output is read; None: it is nothing but text."""
        self.parser = OutputParser(options or ParserOptions(OutputDialect()))
        self._mistral = options is not None and options.dialect.tools == "mistral"
        self._parts: list[tuple[PartKind, list[str]]] = []
        self._calls: list[CohereCall] = []
        self._started_calls = 0
        """Calls that a stream has begun, retracted ones included."""
        self._open: PartKind | CohereCall | None = None
        self._blank = ""
        """White space that is part of a text only if more of it follows."""

    def feed(self, text: str, finish: FinishReason | None) -> list[Event]:
        """Returns the events of new output; none where nothing is decided yet."""
        events: list[Event] = []
        for each in self.parser.read(text, finish):
            self._add(each, events)
        if finish is not None:
            self._close(events)
        return events

    def finish_reason(self, reason: FinishReason) -> str:
        """Returns whether the output stopped after a call of a tool, or the reason."""
        return "tool_calls" if self._calls and reason == "stop" else reason

    def body(self) -> dict[str, Any]:
        """Returns the answer's `message`."""
        content = [{"type": kind, kind: "".join(pieces)} for kind, pieces in self._parts]
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        return message | ({"tool_calls": [call.body() for call in self._calls]} if self._calls else {})

    def _add(self, event: ParseEvent, events: list[Event]) -> None:
        match event:
            case ContentText(text):
                self._extend("text", text, events)
            case ReasoningText(text):
                self._extend("thinking", text, events)
            case ToolCallStart(name, identity):
                self._close(events)
                identity = identity or (mistral_id() if self._mistral else openai_id())
                call = CohereCall(identity, name)
                self._open = call
                self._calls.append(call)
                events.append(self._event("tool-call-start", self._started_calls, tool_calls=call.body()))
                self._started_calls += 1
            case ToolCallArguments(text):
                assert isinstance(self._open, CohereCall)
                self._open.arguments.append(text)
                added = {"function": {"arguments": text}}
                events.append(self._event("tool-call-delta", self._started_calls - 1, tool_calls=added))
            case ToolCallRetraction():
                self._close(events)
                self._calls.pop()
            case ToolCallEnd():
                self._close(events)
            case _:
                assert_never(event)

    def _extend(self, kind: PartKind, text: str, events: list[Event]) -> None:
        if self._open != kind:
            self._close(events)
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
            self._open = kind
            self._parts.append((kind, []))
            begun = {"type": kind, kind: ""}
            events.append(self._event("content-start", len(self._parts) - 1, content=begun))
        self._blank = ""
        self._parts[-1][1].append(text)
        events.append(self._event("content-delta", len(self._parts) - 1, content={kind: text}))

    def _close(self, events: list[Event]) -> None:
        self._blank = ""
        if isinstance(self._open, CohereCall):
            events.append({"type": "tool-call-end", "index": self._started_calls - 1})
        elif self._open is not None:
            events.append({"type": "content-end", "index": len(self._parts) - 1})
        self._open = None

    def _event(self, kind: str, index: int, **message: Any) -> Event:
        return {"type": kind, "index": index, "delta": {"message": message}}


def answer_body(header: ResponseHeader, choice: ChoiceState, *, logprobs: bool) -> dict[str, Any]:
    """Returns the JSON of an answer that is not streamed, for `LazyEncoder`."""
    assert isinstance(choice.message, CohereMessage)
    body = {"id": header.id, "message": choice.message.body(), **ending(choice)}
    if logprobs:
        body["logprobs"] = LazyArray(logprob_item([position]) for position in choice.logprobs)
    return body


def begin_event(header: ResponseHeader) -> Event:
    """Returns the first event of a stream."""
    empty: dict[str, Any] = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
    return {"type": "message-start", "id": header.id, "delta": {"message": empty}}


def ending(choice: ChoiceState) -> dict[str, Any]:
    """Returns why an answer has ended, and what it took."""
    reason = _FINISH.get(choice.finish_reason or "", "ERROR")
    if reason == "COMPLETE" and isinstance(choice.stop_reason, str):
        reason = "STOP_SEQUENCE"
    tokens = {"input_tokens": choice.prompt_tokens, "output_tokens": choice.tokens}
    usage = {"billed_units": tokens, "tokens": tokens, "cached_tokens": choice.cached_tokens}
    return {"finish_reason": reason, "usage": usage}


def logprob_item(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    """Returns the log-probabilities of some tokens of the output."""
    chosen = [position.chosen for position in positions]
    return {
        "text": "".join(each.token for each in chosen),
        "token_ids": [each.token_id for each in chosen],
        "logprobs": [max(each.logprob, MIN_LOGPROB) for each in chosen],
    }
