"""The content blocks of an answer while it arrives: as events of a stream, and whole at the end."""

from __future__ import annotations

import json
import secrets
from typing import Any, Literal, assert_never

from services.gateway.api.chat import mistral_id
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
BlockKind = Literal["text", "thinking", "tool_use"]

_DELTAS: dict[BlockKind, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""The type of what is added to a block, and the field that holds it."""


class ContentBlock:
    """One block, as far as it has arrived."""

    def __init__(self, kind: BlockKind, named: dict[str, str]) -> None:
        self.kind, self._named = kind, named
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        """Appends what has arrived."""
        self._pieces.append(text)

    def start(self) -> dict[str, Any]:
        """Returns it as a stream begins it."""
        return self._body("", {})

    def body(self) -> dict[str, Any]:
        """Returns it whole. Arguments that an output's limit has cut off are an empty object."""
        text = "".join(self._pieces)
        return self._body(text, _object(text) if self.kind == "tool_use" else {})

    def _body(self, text: str, arguments: dict[str, Any]) -> dict[str, Any]:
        match self.kind:
            case "text":
                return {"type": "text", "text": text, "citations": None}
            case "thinking":
                return {"type": "thinking", "thinking": text, "signature": ""}
            case "tool_use":
                return {"type": "tool_use", **self._named, "input": arguments, "caller": {"type": "direct"}}


class MessageBlocks:
    """Owns an answer's blocks. Text between them that is only white space is left out."""

    def __init__(self, options: ParserOptions | None) -> None:
        """`options`: how the output is read; None: it is nothing but text."""
        self.parser = OutputParser(options or ParserOptions(OutputDialect()))
        self._mistral = options is not None and options.dialect.tools == "mistral"
        self._blocks: list[ContentBlock] = []
        self._open: ContentBlock | None = None
        self._blank = ""
        """White space that is part of a text only if more of it follows."""
        self._started = 0
        """Blocks that a stream has begun, retracted ones included."""

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
        called = any(block.kind == "tool_use" for block in self._blocks)
        return "tool_calls" if called and reason == "stop" else reason

    def body(self) -> list[dict[str, Any]]:
        """Returns the answer's `content`."""
        return [block.body() for block in self._blocks]

    def _add(self, event: ParseEvent, events: list[Event]) -> None:
        match event:
            case ContentText(text):
                self._extend("text", text, events)
            case ReasoningText(text):
                self._extend("thinking", text, events)
            case ToolCallStart(name, identity):
                self._close(events)
                identity = identity or (mistral_id() if self._mistral else f"toolu_{secrets.token_hex(12)}")
                self._begin(ContentBlock("tool_use", {"id": identity, "name": name}), events)
            case ToolCallArguments(text):
                self._append(text, events)
            case ToolCallRetraction():
                retracted = self._open
                self._close(events)
                self._blocks = [block for block in self._blocks if block is not retracted]
            case ToolCallEnd():
                self._close(events)
            case _:
                assert_never(event)

    def _extend(self, kind: BlockKind, text: str, events: list[Event]) -> None:
        if self._open is None or self._open.kind != kind:
            self._close(events)
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
            self._blank = ""
            self._begin(ContentBlock(kind, {}), events)
        self._append(text, events)

    def _begin(self, block: ContentBlock, events: list[Event]) -> None:
        self._blank = ""
        self._open = block
        self._blocks.append(block)
        self._started += 1
        events.append({"type": "content_block_start", "index": self._started - 1, "content_block": block.start()})

    def _append(self, text: str, events: list[Event]) -> None:
        assert self._open is not None
        self._open.add(text)
        kind, name = _DELTAS[self._open.kind]
        events.append(self._delta({"type": kind, name: text}))

    def _close(self, events: list[Event]) -> None:
        self._blank = ""
        if self._open is None:
            return
        if self._open.kind == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": ""}))
        events.append({"type": "content_block_stop", "index": self._started - 1})
        self._open = None

    def _delta(self, delta: dict[str, str]) -> Event:
        return {"type": "content_block_delta", "index": self._started - 1, "delta": delta}


def _object(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
