"""`POST /v1/decisions`: questions about one input, each answered by how likely its options are to the model. Reads the
body as a chat for each question, whose answer is one token."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.gateway.api.chat import ChatFields, chat_request
from services.gateway.api.decisions.questions import (
    LETTERS,
    Question,
    check_question,
    json_text,
    options,
    question_text,
)
from services.gateway.api.errors import RequestError, decode_body, invalid, renamed, unsupported
from services.gateway.api.generation import GenerationRequest, RequestLimits
from services.gateway.api.responses.input_items import Item, Message, Turns, add_items
from shared.messages.model_card import ModelCard


class DecisionFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `POST /v1/decisions`: OpenAI's fields, and some that chats have."""

    input: str | list[dict[str, Any]]
    questions: list[Question]
    model: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    # Those that change no answer.
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None


class DecisionRequest(Struct, frozen=True):
    """A checked request: its prompts are the questions, each behind the input."""

    generation: GenerationRequest
    questions: tuple[Question, ...]

    @property
    def letters(self) -> str:
        """The options' of the question that has most."""
        return LETTERS[: max(map(options, self.questions))]


_decoder = msgspec.json.Decoder(DecisionFields)
_THEIRS = {"messages": "input", "n": "questions"}


def read_decisions(body: bytes, cards: list[ModelCard], limits: RequestLimits) -> DecisionRequest:
    """Reads and checks a body. Raises RequestError."""
    fields = decode_body(body, _decoder)
    if not 1 <= len(fields.questions) <= limits.max_choices:
        raise invalid("questions", f"{len(fields.questions)} are not allowed; 1 to {limits.max_choices} are")
    if (whole := len(body) * len(fields.questions)) > limits.max_body:
        rule = f"at most {limits.max_body} bytes may be read for them, as each is asked with the whole input"
        raise invalid("questions", f"{len(fields.questions)} of a body of {len(body)} bytes make {whole}; {rule}")
    texts = []
    for i, question in enumerate(fields.questions):
        check_question(question, f"questions[{i}]")
        texts.append(question_text(question, f"questions[{i}]"))
    messages = _messages(fields.input)
    try:
        chats = [chat_request(_chat(fields, messages, text), cards, limits, None, kind="decision") for text in texts]
    except RequestError as error:
        raise renamed(error, _THEIRS) from None
    if chats[0].media:
        raise unsupported("input", f"{chats[0].media[0].kind.a_noun} in a decision")
    prompts = tuple(prompt for chat in chats for prompt in chat.prompts)
    return DecisionRequest(replace(chats[0], prompts=prompts), tuple(fields.questions))


def _chat(fields: DecisionFields, messages: list[Message], question: str) -> ChatFields:
    """The chat that asks one question: the letter is the answer's first token, so there is no reasoning before it."""
    *earlier, last = messages
    if last["role"] == "user" and isinstance(last["content"], str):
        asked = [*earlier, {"role": "user", "content": f"{last['content']}\n\n{question}"}]
    else:
        asked = [*messages, {"role": "user", "content": question}]
    return ChatFields(
        messages=asked,
        model=fields.model,
        max_tokens=1,
        temperature=0,
        ignore_eos=True,
        logprobs=True,
        chat_template_kwargs={"enable_thinking": False, **(fields.chat_template_kwargs or {})},
        cache_salt=fields.cache_salt,
        priority=fields.priority,
        request_id=fields.request_id,
    )


def _messages(given: str | list[Item]) -> list[Message]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    turns = Turns()
    add_items([_spelled(item, f"input[{i}]") for i, item in enumerate(given)], "input", turns)
    if not turns.messages:  # reasoning without a text is none
        raise invalid("input", f"{len(given)} items without a message are not allowed; at least one is needed")
    return turns.messages


def _spelled(item: Item, where: str) -> Item:
    """The item with a text in place of JSON."""
    if not isinstance(content := item.get("content"), list):
        return item
    parts = [
        {"type": "input_text", "text": json_text(part, f"{where}.content[{i}]")}
        if isinstance(part, dict) and part.get("type") == "input_json"
        else part
        for i, part in enumerate(content)
    ]
    return {**item, "content": parts}
