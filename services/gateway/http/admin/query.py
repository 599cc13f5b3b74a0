"""The fields in the query string of an operator's call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.api.errors import abbreviated, not_allowed
from services.gateway.http.call import Call

SWITCH = {"true": True, "1": True, "false": False, "0": False}


def query(call: Call, fields: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What a call's query string says, by field; `fields` has what each may say, and what that means. Raises
    RequestError 400 for others."""
    found: dict[str, Any] = {}
    known = f"the query's fields are {', '.join(fields)}" if fields else "the query has no fields"
    for name, value in call.query():
        if name not in fields:
            raise not_allowed(abbreviated(name)[1:-1], value, known)
        choices = fields[name]
        if value.lower() not in choices:
            raise not_allowed(name, value, "true or false" if choices is SWITCH else ", ".join(choices))
        found[name] = choices[value.lower()]
    return found


def query_list(call: Call, name: str) -> list[str]:
    """All values of the one field that a call's query may have. Raises RequestError 400 for other fields."""
    found = call.query()
    for other, value in found:
        if other != name:
            raise not_allowed(abbreviated(other)[1:-1], value, f"the query's fields are {name}")
    return [value for _, value in found]
