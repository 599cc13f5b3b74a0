"""The keywords of JSON Schema (2020-12, and draft 7's that are still written), by what they say."""

from __future__ import annotations

from typing import Any

from services.worker.guided.refusal import GrammarRefused

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
"""What is enforced. All others are notes to the reader, or `REFUSED`."""

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


def refuse(path: str, reason: str) -> GrammarRefused:
    return GrammarRefused(f"{path}: {reason}")


def assertions(schema: Schema, path: str) -> Schema:
    """Those of `schema`, its own order kept. Raises GrammarRefused for what could not be enforced."""
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
    return {
        keyword: value
        for keyword, value in schema.items()
        if keyword in ASSERTIONS and not (keyword in UNEVALUATED and value is True)
    }


def types_of(schema: Schema, path: str) -> tuple[str, ...]:
    """Those that are declared; all where none is. Raises GrammarRefused."""
    declared = schema.get("type", list(TYPES))
    names = declared if isinstance(declared, list) else [declared]
    for name in names:
        if name not in TYPES:
            raise refuse(f"{path}.type", f"{name!r} is not a type; one of {', '.join(TYPES)} is")
    if not names:
        raise refuse(f"{path}.type", "[] is not allowed; at least one type is needed")
    return tuple(name for name in dict.fromkeys(names) if not (name == "integer" and "number" in names))


def count_of(schema: Schema, keyword: str, path: str) -> int | None:
    """A number of characters, items or properties. Raises GrammarRefused."""
    value = schema.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise refuse(f"{path}.{keyword}", f"{value!r} is not allowed; a whole number from 0 is")
    return int(value)
