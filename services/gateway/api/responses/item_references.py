"""`item_reference`: an item of a stored response, named by its id in place of its content.

An item's id has that of the response in it that brought or wrote it, so that it is found without an index.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from services.gateway.api.errors import RequestError, abbreviated, invalid, not_allowed
from services.gateway.api.responses.input_items import Item

MAX_REFERENCES = 1024
MAX_REFERENCED = 64 * 2**20
"""Bytes of the stored items that are looked through for one request."""
_ITEM_ID = re.compile(r"[a-z]{1,8}_([0-9a-f]{48})[0-9a-f]{4}")


def referred_ids(items: list[Item]) -> list[str]:
    """Returns the ids that items refer to. Raises RequestError 400 for one that is none, and for too many."""
    ids = list[str]()
    for i, item in enumerate(items):
        if not _refers(item):
            continue
        if not isinstance(id := item.get("id"), str):
            raise not_allowed(f"input[{i}].id", id, "the id of a stored item is")
        ids.append(id)
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
    there = {item.get("id") for item in earlier}
    return [_item(item, known, there, f"input[{i}]") if _refers(item) else item for i, item in enumerate(items)]


def _item(item: Item, known: Mapping[str, Item], there: set[Any], where: str) -> Item:
    id = item["id"]
    if id not in known:
        raise unknown_item(id)
    if id in there:
        raise invalid(f"{where}.id", f"Duplicate item found with id {abbreviated(id)}. Remove it from your input.")
    there.add(id)
    return known[id]


def _refers(item: Item) -> bool:
    kind, role = item.get("type"), item.get("role")
    return kind == "item_reference" or (kind is None and role is None)
