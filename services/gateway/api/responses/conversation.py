"""Conversations as clients see them, and the bodies of requests that make or change one."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.gateway.api.errors import decode_body, invalid
from services.gateway.api.fields.metadata import check_metadata
from services.gateway.api.responses.input_items import Item, Turns, add_items, numbered

MAX_NEW_ITEMS = 20
"""That one call adds. OpenAI's limit."""


class ConversationFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `POST /v1/conversations`."""

    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


class ConversationUpdateFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `POST /v1/conversations/{id}`."""

    metadata: dict[str, str] | UnsetType | None = UNSET


class ConversationItemsFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `POST /v1/conversations/{id}/items`."""

    items: list[dict[str, Any]]


class ConversationRequest(Struct, frozen=True):
    """What a checked body says."""

    items: list[Item]
    """As they are stored."""
    metadata: dict[str, str]


_new = msgspec.json.Decoder(ConversationFields)
_update = msgspec.json.Decoder(ConversationUpdateFields)
_items = msgspec.json.Decoder(ConversationItemsFields)


def read_conversation(body: bytes) -> ConversationRequest:
    """Reads the body that makes a conversation; an empty one is taken, too. Raises RequestError."""
    fields = decode_body(body, _new) if body else ConversationFields()
    metadata = fields.metadata or {}
    check_metadata(metadata)
    return ConversationRequest(_checked(fields.items or []), metadata)


def read_conversation_update(body: bytes) -> ConversationRequest:
    """Reads the body that changes one. Raises RequestError."""
    metadata = decode_body(body, _update).metadata
    if isinstance(metadata, UnsetType):
        raise invalid("metadata", "this field is required")
    check_metadata(metadata or {})
    return ConversationRequest([], metadata or {})


def read_conversation_items(body: bytes) -> ConversationRequest:
    """Reads the body that adds items to one. Raises RequestError."""
    items = decode_body(body, _items).items
    if not items:
        raise invalid("items", "[] is not allowed; at least one item is needed")
    return ConversationRequest(_checked(items), {})


def conversation_object(id: str, created: float, metadata: dict[str, str]) -> dict[str, Any]:
    """Returns OpenAI's conversation object."""
    return {"id": id, "object": "conversation", "created_at": int(created), "metadata": metadata}


def _checked(items: list[Item]) -> list[Item]:
    if len(items) > MAX_NEW_ITEMS:
        raise invalid("items", f"{len(items)} items are not allowed; at most {MAX_NEW_ITEMS} in one call")
    add_items(items, "items", Turns())
    return numbered(items, secrets.token_hex(24))
