"""The content blocks of an answer while it arrives: as events of a stream, and whole at the end."""

from __future__ import annotations

import secrets
from typing import Any, Literal

from services.gateway.api.chat import mistral_id
from services.gateway.parsing.answer_parts import AnswerParts, Event, TextKind
from services.gateway.parsing.events import arguments_object

BlockKind = Literal["text", "thinking", "tool_use"]

_DELTAS: dict[BlockKind, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""The type of what is added to a block, and the field that holds it."""


class ContentBlock:
    """One block, as far as it has arrived."""

    def __init__(self, kind: BlockKind, index: int, named: dict[str, str]) -> None:
        """`index`: its number in the stream. `named`: the name and id of a call."""
        self._kind, self._index, self._named = kind, index, named
        self._pieces: list[str] = []

    def begin(self) -> list[Event]:
        """Returns the event of its start."""
        return [self._event("content_block_start", content_block=self._body("", {}))]

    def add(self, text: str) -> list[Event]:
        """Appends what has arrived."""
        self._pieces.append(text)
        kind, name = _DELTAS[self._kind]
        return [self._event("content_block_delta", delta={"type": kind, name: text})]

    def end(self, *, cut_off: bool) -> list[Event]:
        """Returns the events with which it ends."""
        signature = self._event("content_block_delta", delta={"type": "signature_delta", "signature": ""})
        return [*([signature] if self._kind == "thinking" else []), self._event("content_block_stop")]

    def body(self) -> dict[str, Any]:
        """Returns it whole. Arguments that an output's limit has cut off are an empty object."""
        text = "".join(self._pieces)
        return self._body(text, arguments_object(text) if self._kind == "tool_use" else {})

    def _body(self, text: str, arguments: dict[str, Any]) -> dict[str, Any]:
        match self._kind:
            case "text":
                return {"type": "text", "text": text, "citations": None}
            case "thinking":
                return {"type": "thinking", "thinking": text, "signature": ""}
            case "tool_use":
                return {"type": "tool_use", **self._named, "input": arguments, "caller": {"type": "direct"}}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": self._index, **fields}


class MessageBlocks(AnswerParts[ContentBlock]):
    """Owns an answer's blocks."""

    def body(self) -> list[dict[str, Any]]:
        """Returns the answer's `content`."""
        return [block.body() for block in self._parts]

    def _new_text(self, kind: TextKind, text: str) -> ContentBlock:
        return ContentBlock("thinking" if kind == "reasoning" else "text", self._started, {})

    def _new_call(self, name: str, identity: str | None) -> ContentBlock:
        identity = identity or (mistral_id() if self._mistral else f"toolu_{secrets.token_hex(12)}")
        return ContentBlock("tool_use", self._started, {"id": identity, "name": name})
