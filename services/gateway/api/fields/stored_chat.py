"""`store` of a chat: what is kept of its request, and the bodies that change what was kept."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.gateway.api.errors import abbreviated, decode_body, invalid, not_allowed
from services.gateway.api.fields.metadata import check_metadata

MAX_STORED_MESSAGES = 16_384
_REPEATED = (
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"),
    *("tools", "tool_choice", "response_format"),
)
"""Fields that a stored chat says again."""


class ChatToStore(Struct, frozen=True):
    """What is kept of a request beside its answer."""

    metadata: dict[str, str]
    repeated: bytes
    """JSON of the fields that the stored answer says again."""
    messages: tuple[bytes, ...]
    """JSON of each of its messages, which have no ids yet."""


class StoredChatUpdateFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `POST /v1/chat/completions/{id}`."""

    metadata: dict[str, str] | UnsetType | None = UNSET


class StoredFields(Protocol):
    """The fields of a chat that this module reads."""

    messages: list[dict[str, Any]]
    metadata: Any
    user: str | None
    request_id: str | None
    prompt_token_ids: list[int] | None


_update = msgspec.json.Decoder(StoredChatUpdateFields)


def chat_to_store(fields: StoredFields) -> ChatToStore:
    """Returns what is to be kept of a chat, as the client sent it. Raises RequestError 400."""
    if fields.request_id is not None:
        raise invalid("request_id", "only allowed where `store` is false: a stored chat needs an id of its own")
    if fields.prompt_token_ids is not None:
        raise invalid("store", "not allowed together with prompt_token_ids: there are no messages to be kept")
    if len(fields.messages) > MAX_STORED_MESSAGES:
        count = len(fields.messages)
        raise invalid("messages", f"{count} messages are not allowed where `store` is true; {MAX_STORED_MESSAGES} are")
    repeated: dict[str, Any] = {name: getattr(fields, name) for name in _REPEATED}
    return ChatToStore(
        _metadata(fields.metadata),
        msgspec.json.encode(repeated | {"input_user": fields.user}),
        tuple(_message(message) for message in fields.messages),
    )


def read_chat_update(body: bytes) -> dict[str, str]:
    """Reads the body that changes a stored chat: its metadata. Raises RequestError."""
    metadata = decode_body(body, _update).metadata
    if isinstance(metadata, UnsetType):
        raise invalid("metadata", "this field is required")
    check_metadata(metadata or {})
    return metadata or {}


def _metadata(given: Any) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise not_allowed("metadata", given, "an object of texts is")
    for name, value in given.items():
        if not isinstance(value, str):
            raise not_allowed(f"metadata.{abbreviated(name)[1:-1]}", value, "a text is")
    check_metadata(given)
    return given


def _message(message: dict[str, Any]) -> bytes:
    """A message as OpenAI lists it: a text, or parts in a field of their own."""
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    shown = {"role": message.get("role"), "content": None if parts is not None else content, "name": None}
    rest = {name: value for name, value in message.items() if name not in ("id", "content", "content_parts")}
    return msgspec.json.encode(shown | rest | {"content_parts": parts})
