"""The keywords of JSON Schema (2020-12, and those of draft 7 that are still written): their shapes and what they admit.

Also what every refusal of a grammar is raised as. Pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

BY_TYPE: dict[str, frozenset[str]] = {
    "object": frozenset(
        {
            "properties",
            "required",
            "additionalProperties",
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
            "unevaluatedProperties",
        }
    ),
    "array": frozenset(
        {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"}
    ),
    "string": frozenset({"pattern", "format", "minLength", "maxLength"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
BY_TYPE["integer"] = BY_TYPE["number"]

UNEVALUATED = frozenset({"unevaluatedProperties", "unevaluatedItems"})
COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
ASSERTIONS = frozenset({"type", "enum", "const"}) | COMBINING | frozenset().union(*BY_TYPE.values())
"""Keywords that are enforced. All others are annotations, or in `REFUSED`."""

REFUSED = (
    "not",
    "if",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)
"""What a grammar cannot enforce, as it relates places of a document with each other."""


Shape = tuple[Callable[[Any], bool], str]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_SCHEMA: Shape = (lambda value: isinstance(value, dict | bool), "a schema is")
_SCHEMAS: Shape = (lambda value: isinstance(value, list), "a list of schemas is")
_BRANCHES: Shape = (lambda value: isinstance(value, list) and bool(value), "a list of schemas, at least one, is")
_NAMED: Shape = (lambda value: isinstance(value, dict), "an object of schemas is")
_NUMBER: Shape = (_is_number, "a number is")
_COUNT: Shape = (lambda value: _is_number(value) and value >= 0 and value == int(value), "a whole number from 0 is")
_STRING: Shape = (lambda value: isinstance(value, str), "a string is")
_NAMES: Shape = (
    lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "a list of names is",
)
_SHAPES: dict[str, Shape] = {
    **dict.fromkeys(("properties", "patternProperties"), _NAMED),
    **dict.fromkeys(("additionalProperties", "propertyNames", "additionalItems"), _SCHEMA),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), _BRANCHES),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("pattern", "format", "$ref"), _STRING),
    "prefixItems": _SCHEMAS,
    "items": (lambda value: isinstance(value, dict | bool | list), "a schema is"),
    "required": _NAMES,
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false is"),
    "enum": (lambda value: isinstance(value, list), "a list of values is"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0 is"),
}


def refuse(path: str, reason: str) -> GrammarRefused:
    """The exception to raise: `reason` says what is not supported at `path`, a place such as `$.items`."""
    return GrammarRefused(f"{path}: {reason}")


def assertions(schema: Schema, path: str) -> Schema:
    """The enforced keywords of `schema`, in its own order. Raises GrammarRefused for what could not be enforced."""
    for keyword in REFUSED:
        if keyword in schema and (schema[keyword] != {} or keyword in ("not", "if", "contains")):
            raise refuse(f"{path}.{keyword}", "this keyword is not supported")
    for keyword in UNEVALUATED & schema.keys():
        if schema[keyword] is not True and (schema[keyword] is not False or COMBINING & schema.keys()):
            raise refuse(
                f"{path}.{keyword}", "only false is supported, and not together with $ref, allOf, anyOf or oneOf"
            )
    if path != "$" and isinstance(schema.get("$id"), str):
        raise refuse(f"{path}.$id", "a schema within a schema is not supported; use $defs and #/$defs/…")
    for keyword in _SHAPES.keys() & schema.keys():
        fits, allowed = _SHAPES[keyword]
        if not fits(schema[keyword]):
            raise refuse(f"{path}.{keyword}", f"{schema[keyword]!r:.80} is not allowed; {allowed}")
    return {
        keyword: value
        for keyword, value in schema.items()
        if keyword in ASSERTIONS and not (keyword in UNEVALUATED and value is True)
    }


def types_of(schema: Schema, path: str) -> tuple[str, ...]:
    """The types that `schema` declares; all where it declares none. Raises GrammarRefused."""
    declared = schema.get("type", list(TYPES))
    names = declared if isinstance(declared, list) else [declared]
    for name in names:
        if not isinstance(name, str) or name not in TYPES:
            raise refuse(f"{path}.type", f"{name!r} is not a type; one of {', '.join(TYPES)} is")
    if not names:
        raise refuse(f"{path}.type", "[] is not allowed; at least one type is needed")
    return tuple(name for name in dict.fromkeys(names) if not (name == "integer" and "number" in names))


def count_of(schema: Schema, keyword: str) -> int | None:
    """The number of characters, items or properties that `keyword` says; None where it is missing."""
    return None if keyword not in schema else int(schema[keyword])


# Single values against the simple keywords: which values of an `enum` the other keywords admit.


_CHECKED = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "format"}


def type_of(value: Any) -> str:
    """The JSON Schema type of a decoded value; a float without a fraction is an integer."""
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


def value_key(value: Any) -> str:
    """One text for values that JSON Schema takes for equal: 1 is 1.0, and no order of properties counts."""
    return json.dumps(_plain(value), sort_keys=True)


def admitted_values(schema: Schema, path: str) -> list[Any]:
    """The values of `enum` and `const` that the other keywords admit. Raises GrammarRefused."""
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if "const" in schema:
        values = [value for value in values if value_key(value) == value_key(schema["const"])]
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


class GrammarRefused(Exception):
    """A grammar cannot be compiled; the text says why and where, and the client reads it."""
