"""Stored items that are only passed on: all those of a conversation may be millions of values."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import msgspec
from msgspec import Struct

from services.gateway.api.encoding.lazy_json import TURN_SECONDS


class WrittenItem(NamedTuple):
    """An item as it was stored."""

    id: str
    json: msgspec.Raw


class _Named(Struct):
    id: str


_written = msgspec.json.Decoder(list[msgspec.Raw])
_named = msgspec.json.Decoder(_Named)


async def written_items(items: bytes) -> list[WrittenItem]:
    """Returns the items of a JSON array that was stored, read in turns with all else that an event loop has to do."""
    found, since = list[WrittenItem](), time.monotonic()
    for item in _written.decode(items):
        found.append(WrittenItem(_named.decode(item).id, item))
        if time.monotonic() > since + TURN_SECONDS:
            await asyncio.sleep(0)
            since = time.monotonic()
    return found
