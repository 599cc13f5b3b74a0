"""Stored items that are only passed on: all those of a conversation may be millions of values."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec import Struct


class WrittenItem(NamedTuple):
    """An item as it was stored."""

    id: str
    json: msgspec.Raw


class _Named(Struct):
    id: str


_written = msgspec.json.Decoder(list[msgspec.Raw])
_named = msgspec.json.Decoder(_Named)


def written_items(items: bytes) -> list[WrittenItem]:
    """Returns the items of a JSON array that was stored."""
    return [WrittenItem(_named.decode(item).id, item) for item in _written.decode(items)]
