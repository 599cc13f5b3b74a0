"""An array's keywords as the compiler takes them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.worker.guided.schema.keywords import Schema, count_of, refuse

Read = Callable[[Any, str], Schema | None]


def array_form(schema: Schema, path: str, read: Read, *, closed: bool) -> Schema | None:
    """None where there is no such array. Raises GrammarRefused. `closed`: by unevaluatedItems."""
    least, most = count_of(schema, "minItems") or 0, count_of(schema, "maxItems")
    prefix, rest = _prefix_and_rest(schema, path, read, closed=closed)
    if rest is None:
        most = len(prefix) if most is None else min(most, len(prefix))
    if most is not None:
        prefix = prefix[:most]
        if least > most:
            return None
    if schema.get("uniqueItems") is True and most not in (0, 1):
        raise refuse(f"{path}.uniqueItems", "not supported")
    form: Schema = {"type": "array"}
    if prefix:
        form["prefixItems"] = prefix
    if most == 0:
        return {"type": "array", "maxItems": 0}
    if rest is not None and len(prefix) != most:
        form["items"] = rest or True
    else:
        form["items"] = False
        most = None
    form |= {"minItems": least} if least else {}
    return form | ({"maxItems": most} if most is not None else {})


def _prefix_and_rest(schema: Schema, path: str, read: Read, *, closed: bool) -> tuple[list[Schema], Schema | None]:
    """Forms of the first items, one each, and of all behind them: None where there are none."""
    given, others, where = schema.get("prefixItems", []), schema.get("items", not closed), "items"
    if isinstance(others, list):
        given, others, where = others, schema.get("additionalItems", not closed), "additionalItems"
    prefix: list[Schema] = []
    for place, item in enumerate(given):
        form = read(item, f"{path}.prefixItems[{place}]")
        if form is None:
            return prefix, None
        prefix.append(form)
    return prefix, read(others, f"{path}.{where}")
