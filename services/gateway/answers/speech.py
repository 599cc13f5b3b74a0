"""What a chat's model says, taken apart: message text, thoughts, and tool calls with ids of their own."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, NamedTuple, assert_never

from services.gateway.parsing.output_parser import OutputParser, Parsing
from services.gateway.parsing.pieces import (
    Arguments,
    CallBegan,
    CallBroken,
    CallEnded,
    Content,
    Piece,
    Reasoning,
)
from shared.messages.generation import FinishReason

REASONING_FIELDS = ("reasoning_content", "reasoning")
"""vLLM's name for thoughts, and the name it had before; clients know one or the other."""

NewId = Callable[[], str]


def openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


ALPHANUMERIC = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def mistral_id() -> str:
    """Mistral's templates take no other ids than nine letters and digits."""
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))


class _Call(NamedTuple):
    id: str
    name: str
    arguments: list[str]


class Speech:
    """Owns one choice's message: what came, and in a stream what has not been sent of it."""

    def __init__(self, parsing: Parsing, new_id: NewId | None = None) -> None:
        self.parser = OutputParser(parsing)
        self._new_id = new_id or (mistral_id if parsing.dialect.tools == "mistral" else openai_id)
        self._parsing = parsing
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._begun = 0
        """Calls that a stream has told of, broken ones included."""

    def take(self, text: str, finish: FinishReason | None) -> dict[str, Any]:
        """The new text as `choices[].delta`; empty where nothing is decided."""
        pieces = self.parser.feed(text)
        if finish is not None:
            pieces += self.parser.finish(cut=finish == "length")
        delta: dict[str, Any] = {}
        for piece in pieces:
            self._add(piece, delta)
        return delta

    def finish(self, reason: FinishReason) -> str:
        """`finish_reason`. An output that was cut off says so, calls or not."""
        return "tool_calls" if self._calls and reason == "stop" else reason

    def message(self) -> dict[str, Any]:
        """`choices[].message`, as far as it has come."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if self._calls else "")}
        message["refusal"] = None
        if self._parsing.dialect.reasoning is not None and self._parsing.tell_reasoning:
            reasoning = "".join(self._reasoning) or None
            message |= dict.fromkeys(REASONING_FIELDS, reasoning)
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for call in self._calls
            ]
        return message

    def _add(self, piece: Piece, delta: dict[str, Any]) -> None:
        match piece:
            case Content(text):
                self._content.append(text)
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                self._reasoning.append(text)
                delta |= dict.fromkeys(REASONING_FIELDS, delta.get("reasoning", "") + text)
            case CallBegan(name):
                self._calls.append(_Call(self._new_id(), name, []))
                self._begun += 1
                self._call_delta(delta, self._calls[-1])
            case Arguments(text):
                self._calls[-1].arguments.append(text)
                self._call_delta(delta)["function"]["arguments"] += text
            case CallBroken():
                self._calls.pop()
            case CallEnded():
                pass
            case _:
                assert_never(piece)

    def _call_delta(self, delta: dict[str, Any], new: _Call | None = None) -> dict[str, Any]:
        """The present call's entry in `delta`, made where there is none yet."""
        entries: list[dict[str, Any]] = delta.setdefault("tool_calls", [])
        index = self._begun - 1
        if new is not None:
            function = {"name": new.name, "arguments": ""}
            entries.append({"index": index, "id": new.id, "type": "function", "function": function})
        elif not entries or entries[-1]["index"] != index:
            entries.append({"index": index, "function": {"arguments": ""}})
        return entries[-1]
