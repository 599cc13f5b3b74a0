"""Stored items as they were written: all those of a conversation may be millions of values, most of them
log-probabilities, which no prompt has."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple, TypedDict

import msgspec
from msgspec import Struct

from services.gateway.api.encoding.lazy_json import TURN_SECONDS


class WrittenItem(NamedTuple):
    """An item as it was stored."""

    id: str
    json: msgspec.Raw


class _Named(Struct):
    id: str


class _ReadPart(TypedDict, total=False):
    type: Any
    text: Any
    refusal: Any
    image_url: Any
    file_id: Any
    detail: Any


class _ReadItem(TypedDict, total=False):
    type: Any
    id: Any
    status: Any
    role: Any
    content: str | list[_ReadPart] | None
    summary: str | list[_ReadPart] | None
    encrypted_content: Any
    call_id: Any
    name: Any
    namespace: Any
    arguments: Any
    input: Any
    output: str | list[_ReadPart] | None
    tools: Any


_written = msgspec.json.Decoder(list[msgspec.Raw])
_named = msgspec.json.Decoder(_Named)
_read: msgspec.json.Decoder[Any] = msgspec.json.Decoder(list[_ReadItem])


async def written_items(items: bytes) -> list[WrittenItem]:
    """Returns the items of a JSON array that was stored, read in turns with all else that an event loop has to do."""
    found, since = list[WrittenItem](), time.monotonic()
    for item in _written.decode(items):
        found.append(WrittenItem(_named.decode(item).id, item))
        if time.monotonic() > since + TURN_SECONDS:
            await asyncio.sleep(0)
            since = time.monotonic()
    return found


def joined(*arrays: bytes) -> bytes:
    """Returns the items of JSON arrays as one array."""
    insides = (array.strip()[1:-1].strip() for array in arrays)
    return b"[%b]" % b",".join(inside for inside in insides if inside)


def prompt_items(items: bytes) -> list[dict[str, Any]]:
    """Returns of the items of a JSON array that was stored what makes the prompt."""
    read: list[dict[str, Any]]
    try:
        read = _read.decode(items)
    except msgspec.ValidationError:  # what no prompt has may be anything: a summary of a call, say
        read = msgspec.json.decode(items)
    return read
