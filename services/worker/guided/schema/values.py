"""Single values against the simple keywords: which of an `enum` can be meant. Pure."""

from __future__ import annotations

import json
from typing import Any

from services.worker.guided.schema.keywords import BY_TYPE, Schema, refuse, types_of

_CHECKED = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "format"}


def type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "integer" if value == int(value) else "number"
        case list():
            return "array"
        case _:
            return "object"


def key(value: Any) -> str:
    """One text for values that JSON Schema takes for equal: 1 is 1.0, and no order of properties counts."""
    return json.dumps(_plain(value), sort_keys=True)


def meant(schema: Schema, path: str) -> list[Any]:
    """The values of `enum` and `const` that the other keywords admit. Raises GrammarRefused."""
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if "const" in schema:
        values = [value for value in values if key(value) == key(schema["const"])]
    types = types_of(schema, path)
    return [value for value in values if _has_type(value, types) and _admitted(value, schema, path)]


def _has_type(value: Any, types: tuple[str, ...]) -> bool:
    name = type_of(value)
    return name in types or (name == "integer" and "number" in types)


def _admitted(value: Any, schema: Schema, path: str) -> bool:
    asked = (BY_TYPE[type_of(value)] & schema.keys()) - {"format"}
    for keyword in sorted(asked - _CHECKED):
        raise refuse(f"{path}.{keyword}", "not supported together with enum or const")
    return all(_holds(value, keyword, schema[keyword]) for keyword in asked)


def _holds(value: Any, keyword: str, bound: Any) -> bool:
    match keyword:
        case "minimum":
            return bool(value >= bound)
        case "maximum":
            return bool(value <= bound)
        case "exclusiveMinimum":
            return bool(value > bound)
        case "exclusiveMaximum":
            return bool(value < bound)
        case "minLength":
            return bool(len(value) >= bound)
        case _:
            return bool(len(value) <= bound)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value == int(value):
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value
