"""Answers of `/v2/chat` while they arrive: as events of a stream, and whole at the end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Literal

from services.gateway.api.chat import mistral_id, openai_id
from services.gateway.api.encoding.lazy_json import LazyArray
from services.gateway.api.logprobs import MIN_LOGPROB
from services.gateway.api.response import ChoiceState, ResponseHeader
from services.gateway.parsing.answer_parts import AnswerParts, Event, TextKind
from shared.messages.gateway import PositionLogprobs

ContentKind = Literal["text", "thinking"]
_FINISH = {"stop": "COMPLETE", "length": "MAX_TOKENS", "tool_calls": "TOOL_CALL", "abort": "ERROR"}


class CohereText:
    """One text of an answer, or one of its thoughts, as far as it has arrived."""

    def __init__(self, kind: ContentKind, index: int) -> None:
        self._kind, self._index = kind, index
        self._pieces: list[str] = []

    @property
    def said(self) -> str | None:
        """A text that is no thought."""
        return "".join(self._pieces) if self._kind == "text" else None

    def begin(self) -> list[Event]:
        """Returns the event of its start."""
        content = {"type": self._kind, self._kind: ""}
        return [_event("content-start", self._index, content=content)]

    def add(self, text: str) -> list[Event]:
        """Appends what has arrived."""
        self._pieces.append(text)
        return [_event("content-delta", self._index, content={self._kind: text})]

    def end(self, *, cut_off: bool) -> list[Event]:
        """Returns the event of its end."""
        return [{"type": "content-end", "index": self._index}]

    def body(self) -> dict[str, Any]:
        """Returns it whole."""
        return {"type": self._kind, self._kind: "".join(self._pieces)}


class CohereCall:
    """One call of a tool, as far as it has arrived."""

    def __init__(self, id: str, name: str, index: int) -> None:
        self._id, self._name, self._index = id, name, index
        self._arguments: list[str] = []

    def begin(self) -> list[Event]:
        """Returns the event of its start."""
        return [_event("tool-call-start", self._index, tool_calls=self.body())]

    def add(self, text: str) -> list[Event]:
        """Appends more of the arguments."""
        self._arguments.append(text)
        return [_event("tool-call-delta", self._index, tool_calls={"function": {"arguments": text}})]

    def end(self, *, cut_off: bool) -> list[Event]:
        """Returns the event of its end."""
        return [{"type": "tool-call-end", "index": self._index}]

    def body(self) -> dict[str, Any]:
        """Returns it as it is shown."""
        function = {"name": self._name, "arguments": "".join(self._arguments)}
        return {"id": self._id, "type": "function", "function": function}


class CohereMessage(AnswerParts[CohereText | CohereCall]):
    """Owns an answer's texts and calls, which are numbered apart."""

    def body(self) -> dict[str, Any]:
        """Returns the answer's `message`. What is said before calls is their plan, as of Cohere's own models; in a
        stream it is a text, as nobody knows there that calls will follow."""
        texts = [part for part in self._parts if isinstance(part, CohereText)]
        calls = [part.body() for part in self._parts if isinstance(part, CohereCall)]
        if not calls:
            return {"role": "assistant", "content": [text.body() for text in texts] or None}
        before = takewhile(lambda part: isinstance(part, CohereText), self._parts)
        plan = [part for part in before if isinstance(part, CohereText) and part.said is not None]
        content = [text.body() for text in texts if text not in plan]
        message: dict[str, Any] = {"role": "assistant", "content": content or None, "tool_calls": calls}
        return message | ({"tool_plan": "".join(text.said or "" for text in plan)} if plan else {})

    def _new_text(self, kind: TextKind, text: str) -> CohereText:
        return CohereText("thinking" if kind == "reasoning" else "text", self._texts)

    def _new_call(self, name: str, identity: str | None) -> CohereCall:
        identity = identity or (mistral_id() if self._mistral else openai_id())
        return CohereCall(identity, name, self._started - self._texts)

    @property
    def _texts(self) -> int:
        return len(self._parts) - self._calls


def _event(kind: str, index: int, **message: Any) -> Event:
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
