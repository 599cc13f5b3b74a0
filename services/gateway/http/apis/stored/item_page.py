"""Lists of items, as OpenAI pages them; and the parameters behind a path."""

from __future__ import annotations

from typing import Any

from services.gateway.api.errors import abbreviated, invalid, not_allowed, unsupported
from services.gateway.api.responses.request import LOGPROBS
from services.gateway.api.responses.written_items import WrittenItem
from services.gateway.http.call import Call

MAX_LISTED = 100
DEFAULT_LISTED = 20


class ItemPage:
    """Which of some items a call asks for."""

    def __init__(self, call: Call) -> None:
        """Raises RequestError 400."""
        query = read_query(call, "include", "limit", "order", "after")
        self._limit = number_of(query, "limit", 1, MAX_LISTED, DEFAULT_LISTED)
        self._after, self._order = query.get("after"), query.get("order", "desc")
        if self._order not in ("asc", "desc"):
            raise not_allowed("order", self._order, "'asc' or 'desc' is")

    def of(self, items: list[WrittenItem]) -> dict[str, Any]:
        """Returns them; `items`: all, the oldest first. Raises RequestError 400."""
        if self._order == "desc":
            items = items[::-1]
        first = dict[str, int]()
        for place, item in enumerate(items):
            first.setdefault(item.id, place)
        if self._after is not None and self._after not in first:
            raise not_allowed("after", self._after, "the id of one of the items is")
        begin = 0 if self._after is None else first[self._after] + 1
        shown = items[begin : self._end(items, first, begin)]
        ends = {"first_id": shown[0].id, "last_id": shown[-1].id} if shown else {"first_id": None, "last_id": None}
        more = begin + len(shown) < len(items)
        return {"object": "list", "data": [item.json for item in shown], **ends, "has_more": more}

    def _end(self, items: list[WrittenItem], first: dict[str, int], begin: int) -> int:
        """Where a page ends. Its last item is where clients go on from: not one with an id that an earlier item has
        (clients may name items, and twice the same), with which they would be shown the same page again. Such a page
        is shorter, or longer where it has nothing else."""
        end = min(begin + self._limit, len(items))
        shorter = (place for place in range(end - 1, begin - 1, -1) if first[items[place].id] == place)
        longer = (place for place in range(end, len(items)) if first[items[place].id] == place)
        if end == len(items):
            return end
        return next(shorter, next(longer, len(items) - 1)) + 1


def read_query(call: Call, *known: str) -> dict[str, str]:
    """Returns the parameters of a call by name; lists are checked only. Raises RequestError 400 for one that is not
    known."""
    query: dict[str, str] = {}
    for name, value in call.query():
        name = name.removesuffix("[]")
        if name not in known:
            raise invalid(abbreviated(name)[1:-1] or "query", "this parameter is not known")
        if name == "include" and value != LOGPROBS:
            raise unsupported("include", abbreviated(value))
        query[name] = value
    return query


def number_of(query: dict[str, str], name: str, low: int, high: int, default: int) -> int:
    """Returns a parameter that is a number. Raises RequestError 400."""
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 12 and low <= int(text) <= high):
        raise not_allowed(name, text, f"a number from {low} to {high} is")
    return int(text)
