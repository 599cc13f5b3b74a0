"""`item_reference`: an item of a stored response, named by its id in place of its content.

An item's id has that of the response in it that brought or wrote it, so that it is found without an index.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from services.gateway.api.errors import RequestError, abbreviated, invalid, not_allowed
from services.gateway.api.responses.input_items import Item
from shared.packing import NOT_DECODED

MAX_REFERENCES = 1024
MAX_REFERENCED = 64 * 2**20
"""Bytes of the stored items that are looked through for one request."""
_ITEM_ID = re.compile(r"[a-z]{1,8}_([0-9a-f]{48})[0-9a-f]{4}")
_MAY_REFER = re.compile(rb'"item_reference"|\{\s*"id"\s*:\s*"[^"\\]*"\s*(?:,\s*"type"\s*:\s*null\s*)?\}')


class _InputFields(Struct):
    input: msgspec.Raw = msgspec.Raw(b"null")


class _NamedItem(Struct):
    type: Any = None
    role: Any = None
    id: Any = None


_input = msgspec.json.Decoder(_InputFields)
_items = msgspec.json.Decoder(list[_NamedItem])


def may_refer(body: bytes) -> bool:
    """Returns whether a body may have references; false for one that has none for certain."""
    return _MAY_REFER.search(body) is not None


def read_item_references(body: bytes) -> list[str]:
    """Returns the ids that a body of `/v1/responses` refers to; none where it is not in order. Raises RequestError 400
    for too many."""
    try:
        given = bytes(_input.decode(body).input)
        items = _items.decode(given) if given.startswith(b"[") else []
    except NOT_DECODED:
        return []
    ids = [item.id for item in items if isinstance(item.id, str) and _refers(item.type, item.role)]
    if len(ids) > MAX_REFERENCES:
        raise invalid("input", f"{len(ids)} item references are not allowed; at most {MAX_REFERENCES}")
    return ids


def response_of(item: str) -> str | None:
    """Returns the id of the response that an item belongs to; None where its id names none."""
    found = _ITEM_ID.fullmatch(item)
    return None if found is None else f"resp_{found[1]}"


def unknown_item(item: str) -> RequestError:
    """Makes a 404 for an item that is not stored."""
    text = f"Item with id {abbreviated(item)} not found. Items are not persisted when `store` is set to false."
    return RequestError(404, text, param="input")


def resolved(items: list[Item], known: Mapping[str, Item], earlier: Iterable[Item]) -> list[Item]:
    """Returns the items with those that are referred to in place of references. `known`: stored items by their ids;
    `earlier`: what the request goes on from anyway. Raises RequestError: 404 for one that is not known, 400 for one
    that is there twice."""
    if not any(_refers(item.get("type"), item.get("role")) for item in items):
        return items
    there = {item.get("id") for item in earlier}
    return [_item(item, known, there, f"input[{i}]") for i, item in enumerate(items)]


def _item(item: Item, known: Mapping[str, Item], there: set[Any], where: str) -> Item:
    if not _refers(item.get("type"), item.get("role")):
        return item
    id = item.get("id")
    if not isinstance(id, str):
        raise not_allowed(f"{where}.id", id, "the id of a stored item is")
    if id not in known:
        raise unknown_item(id)
    if id in there:
        raise invalid(f"{where}.id", f"Duplicate item found with id {abbreviated(id)}. Remove it from your input.")
    there.add(id)
    return known[id]


def _refers(kind: Any, role: Any) -> bool:
    return kind == "item_reference" or (kind is None and role is None)
