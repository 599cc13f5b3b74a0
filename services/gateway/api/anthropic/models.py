"""The models that are served, in the shape of Anthropic's API."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from services.gateway.api.errors import invalid, not_allowed

MAX_LIMIT, LIMIT = 1000, 20
"""Models on a page, as Anthropic has it."""
_LIFECYCLES = ("active", "deprecated", "retired")


def model_page(models: list[dict[str, Any]], query: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Returns the page that `query` asks for. `models`: as OpenAI's API shows them. Raises RequestError 400."""
    asked, lifecycles = dict(query), [value for name, value in query if name in ("lifecycle", "lifecycle[]")]
    for each in lifecycles:
        if each not in _LIFECYCLES:
            raise not_allowed("lifecycle", each, f"{', '.join(map(repr, _LIFECYCLES))} are")
    if lifecycles and "active" not in lifecycles:
        models = []
    limit, after, before = _limit(asked.get("limit")), asked.get("after_id"), asked.get("before_id")
    if after is not None and before is not None:
        raise invalid("before_id", "not allowed together with after_id")
    ids = [model["id"] for model in models]
    if after is not None:
        left = models[_place(ids, "after_id", after) + 1 :]
        shown = left[:limit]
    elif before is not None:
        left = models[: _place(ids, "before_id", before)]
        shown = left[-limit:]
    else:
        left, shown = models, models[:limit]
    data = [model_info(model) for model in shown]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": len(left) > len(shown), "first_id": first, "last_id": last}


def model_info(model: dict[str, Any]) -> dict[str, Any]:
    """Returns one of them. The context is all that prompt and answer may have together."""
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": datetime.fromtimestamp(model["created"], UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": model["max_model_len"],
        "max_tokens": model["max_model_len"],
    }


def _limit(given: str | None) -> int:
    if given is None:
        return LIMIT
    if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= MAX_LIMIT):
        raise not_allowed("limit", given, f"a number from 1 to {MAX_LIMIT} is")
    return int(given)


def _place(ids: list[str], name: str, given: str) -> int:
    if given not in ids:
        raise not_allowed(name, given, "the id of a model is")
    return ids.index(given)
