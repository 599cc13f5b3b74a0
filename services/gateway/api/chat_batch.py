"""`POST /v1/chat/completions/batch`: several conversations, whose answers are the choices of one, as vLLM has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from services.gateway.api.chat import read_chat
from services.gateway.api.errors import FIELDS, RequestError, decode_body, invalid, unsupported
from services.gateway.api.generation import GenerationRequest, RequestLimits
from services.gateway.parsing.output_dialect import OutputDialect
from shared.ids import ModelName
from shared.messages.model_card import ModelCard


class ChatBatchFields(Struct, kw_only=True):
    """The JSON of a batch of chats: that of a chat, but for these fields."""

    messages: list[msgspec.Raw]
    n: int | None = None
    # Not supported. Refused rather than ignored, as the answer would differ from what the client expects.
    stream: bool | None = None
    use_beam_search: bool | None = None
    prompt_token_ids: Any = None
    kv_transfer_params: Any = None
    store: bool | None = None


_decoder = msgspec.json.Decoder(ChatBatchFields)
_REFUSED = ("stream", "use_beam_search", "prompt_token_ids", "kv_transfer_params", "store")


def read_chat_batch(
    body: bytes,
    cards: list[ModelCard],
    limits: RequestLimits,
    dialect_of: Callable[[ModelName], OutputDialect] | None,
) -> GenerationRequest:
    """Reads and checks a body: a request with a prompt of each conversation; see `read_chat`. Raises RequestError."""
    fields = decode_body(body, _decoder)
    for name in _REFUSED:
        if getattr(fields, name):
            raise unsupported(name, "this field of a chat in a batch of them")
    if fields.n not in (None, 1):
        raise invalid("n", f"{fields.n} is not allowed; 1 is: each conversation has one answer")
    if not 1 <= len(fields.messages) <= limits.max_choices:
        count = len(fields.messages)
        raise invalid("messages", f"{count} conversations are not allowed; 1 to {limits.max_choices} are")
    shared = decode_body(body, FIELDS)  # where names that are not known are read, too
    chats = []
    for i, messages in enumerate(fields.messages):
        try:
            chats.append(read_chat(msgspec.json.encode({**shared, "messages": messages}), cards, limits, dialect_of))
        except RequestError as error:
            raise _of_conversation(error, i) from None
        if chats[i].media:
            raise unsupported(f"messages[{i}]", f"{chats[i].media[0].kind.a_noun} in a batch of chats")
        if chats[i].response_options.role != chats[0].response_options.role:
            raise invalid(f"messages[{i}]", "its last message has another role than that of messages[0]")
    return msgspec.structs.replace(
        chats[0],
        prompts=tuple(prompt for chat in chats for prompt in chat.prompts),
        echoed_messages=tuple(text for chat in chats for text in chat.echoed_messages),
    )


def _of_conversation(error: RequestError, i: int) -> RequestError:
    """The error with the place of its conversation."""
    if not (error.param or "").startswith("messages"):
        return error
    message, param = (text.replace("messages", f"messages[{i}]", 1) for text in (error.message, error.param or ""))
    return RequestError(error.status, message, param=param, code=error.code)
