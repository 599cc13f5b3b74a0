"""Answers and errors in the shape of Ollama's API."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Literal, assert_never

import msgspec

from services.gateway.api.errors import RequestError
from services.gateway.api.logprobs import chat_logprobs
from services.gateway.api.response import ChoiceState
from services.gateway.parsing.events import (
    ContentText,
    ParseEvent,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallRetraction,
    ToolCallStart,
    arguments_object,
)
from services.gateway.parsing.output_dialect import OutputDialect
from services.gateway.parsing.output_parser import OutputParser, ParserOptions
from shared.messages.generation import FinishReason
from shared.messages.model_card import ModelCard

AnswerShape = Literal["chat", "generate"]
"""Of `/api/chat`, or of `/api/generate`."""


class OllamaMessage:
    """Owns what has arrived of an answer. Calls of tools are shown once they are whole."""

    def __init__(self, options: ParserOptions | None) -> None:
        """`options`: how the output is read; None: it is nothing but text."""
        self.parser = OutputParser(options or ParserOptions(OutputDialect()))
        self._whole: dict[str, Any] = {}
        self._name, self._arguments = "", list[str]()

    def feed(self, text: str, finish: FinishReason | None) -> dict[str, Any]:
        """Returns what new output adds: `content`, `thinking`, `tool_calls`; nothing where that is not decided yet."""
        added: dict[str, Any] = {}
        for event in self.parser.read(text, finish):
            self._add(event, added)
        for name, value in added.items():
            self._whole[name] = self._whole[name] + value if name in self._whole else value
        return added

    def finish_reason(self, reason: FinishReason) -> str:
        """Returns the reason: calls of tools have none of their own here."""
        return reason

    def body(self) -> dict[str, Any]:
        """Returns all that has arrived."""
        return self._whole

    def _add(self, event: ParseEvent, added: dict[str, Any]) -> None:
        match event:
            case ContentText(text):
                added["content"] = added.get("content", "") + text
            case ReasoningText(text):
                added["thinking"] = added.get("thinking", "") + text
            case ToolCallStart(name, _):
                self._name, self._arguments = name, []
            case ToolCallArguments(text):
                self._arguments.append(text)
            case ToolCallEnd():
                function = {"name": self._name, "arguments": arguments_object("".join(self._arguments))}
                added.setdefault("tool_calls", []).append({"function": function})
            case ToolCallRetraction():
                pass
            case _:
                assert_never(event)


def answer(shape: AnswerShape, model: str, said: dict[str, Any], choice: ChoiceState | None = None) -> dict[str, Any]:
    """Returns a piece of an answer, or all of it. `choice`: whose log-probabilities that have collected go along."""
    body: dict[str, Any] = {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
    if shape == "chat":
        body["message"] = {"role": "assistant", "content": "", **said}
    else:
        body["response"] = said.get("content", "")
        body |= {name: value for name, value in said.items() if name != "content"}
    if choice is not None and choice.logprobs:
        positions, choice.logprobs = choice.logprobs, []
        body["logprobs"] = chat_logprobs(positions)["content"]
    return {**body, "done": False}


def ending(choice: ChoiceState, began: float, now: float) -> dict[str, Any]:
    """Returns the last fields: why it ended, how many tokens, and the times in nanoseconds. `began`, `now`: by the
    response's clock."""
    first = now if choice.first_token_at is None else choice.first_token_at
    return {
        "done": True,
        "done_reason": choice.finish,
        "total_duration": _nanoseconds(now - began),
        "load_duration": 0,
        "prompt_eval_count": choice.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(first - began),
        "eval_count": choice.tokens,
        "eval_duration": _nanoseconds(now - first),
    }


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def error_body(error: RequestError) -> bytes:
    """Returns the JSON of an error."""
    return msgspec.json.encode({"error": error.message})


def model_entry(card: ModelCard, name: str) -> dict[str, Any]:
    """Returns what `/api/tags` and `/api/ps` say of a model. Its size is not known to a gateway: 0."""
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
        "size": 0,
        "digest": blake2b(f"{name}/{card.created}".encode(), digest_size=32).hexdigest(),
        "details": model_details(card),
    }


def model_details(card: ModelCard) -> dict[str, Any]:
    """Returns what is known of its files."""
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": card.dtype,
    }
