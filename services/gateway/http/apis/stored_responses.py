"""`/v1/responses/{id}` and what is below it: responses that were stored."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

import msgspec

from services.gateway.api.errors import RequestError, abbreviated, invalid, not_allowed, unsupported
from services.gateway.api.responses.request import LOGPROBS
from services.gateway.http.call import Call
from services.gateway.response_store import ResponseStore

MAX_LISTED = 100
DEFAULT_LISTED = 20


class StoredResponseEndpoints:
    """Answers what clients ask about the responses of their key; of others they do not learn that they exist."""

    def __init__(self, store: ResponseStore | None) -> None:
        """`store`: None: nothing is stored."""
        self._store = store

    async def get(self, call: Call) -> None:
        """`GET /v1/responses/{id}`. Raises RequestError."""
        _query(call, "include")
        id, store = self._named(call)
        _, stored = await store.find(id, call.key.name)
        await call.respond_json(stored.response)

    async def delete(self, call: Call) -> None:
        """`DELETE /v1/responses/{id}`. Raises RequestError."""
        id, store = self._named(call)
        await store.delete(id, call.key.name)
        await call.respond_json({"id": id, "object": "response", "deleted": True})

    async def input_items(self, call: Call) -> None:
        """`GET /v1/responses/{id}/input_items`: all items that it went on from. Raises RequestError."""
        query = _query(call, "include", "limit", "order", "after")
        limit = _number(query, "limit", 1, MAX_LISTED, DEFAULT_LISTED)
        if (order := query.get("order", "desc")) not in ("asc", "desc"):
            raise not_allowed("order", order, "'asc' or 'desc' is")
        id, store = self._named(call)
        _, stored = await store.find(id, call.key.name)
        items: list[dict[str, Any]] = msgspec.json.decode(await store.items(id, stored))
        if order == "desc":
            items.reverse()
        if (after := query.get("after")) is not None:
            places = [i for i, item in enumerate(items) if item["id"] == after]
            if not places:
                raise not_allowed("after", after, "the id of one of the items is")
            items = items[places[0] + 1 :]
        page = items[:limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        await call.respond_json({"object": "list", "data": page, **ends, "has_more": len(items) > limit})

    def _named(self, call: Call) -> tuple[str, ResponseStore]:
        id: str = call.scope["path_params"]["id"]
        if self._store is None:
            text = f"Response with id {abbreviated(id)} not found: nothing is stored here."
            raise RequestError(404, text, param="response_id")
        return id, self._store


def _query(call: Call, *known: str) -> dict[str, str]:
    """The parameters of a call by name; lists are checked only. Raises RequestError 400 for one that is not known."""
    pairs = parse_qsl(call.scope["query_string"].decode("ascii", "replace"), keep_blank_values=True, max_num_fields=64)
    query: dict[str, str] = {}
    for name, value in pairs:
        name = name.removesuffix("[]")
        if name not in known:
            raise invalid(abbreviated(name)[1:-1] or "query", "this parameter is not known")
        if name == "include" and value != LOGPROBS:
            raise unsupported("include", abbreviated(value))
        query[name] = value
    return query


def _number(query: dict[str, str], name: str, low: int, high: int, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 12 and low <= int(text) <= high):
        raise not_allowed(name, text, f"a number from {low} to {high} is")
    return int(text)
