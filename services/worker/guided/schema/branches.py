"""Whether of two schemas at most one can hold: what `oneOf` asks for, and `anyOf` does not. Pure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

from services.worker.guided.schema.keywords import Schema, types_of
from services.worker.guided.schema.values import key, type_of

Flat = Callable[[Any], Schema | None]
"""A schema without `$ref` and `allOf`; None where nothing satisfies it."""

_DEPTH = 3
"""Properties within properties that are looked at."""


def exclusive(branches: list[Schema], path: str, flat: Flat) -> bool:
    """Whether any two of `branches`, which are flat, certainly exclude each other."""
    return all(_exclude(one, other, path, flat, _DEPTH) for one, other in combinations(branches, 2))


def _exclude(one: Schema, other: Schema, path: str, flat: Flat, depth: int) -> bool:
    kinds, others = _kinds(one, path), _kinds(other, path)
    if not kinds & others:
        return True
    mine, yours = _values(one), _values(other)
    if mine is not None and yours is not None and not mine & yours:
        return True
    return depth > 0 and kinds & others == {"object"} and _told_apart(one, other, path, flat, depth)


def _told_apart(one: Schema, other: Schema, path: str, flat: Flat, depth: int) -> bool:
    """By a property that one of them must have: the other has it with other values, or never."""
    for mine, yours in ((one, other), (other, one)):
        for name in mine.get("required", []):
            if name not in mine.get("properties", {}):
                continue
            if name in yours.get("properties", {}):
                pair = flat(mine["properties"][name]), flat(yours["properties"][name])
                if pair[0] is None or pair[1] is None or _exclude(pair[0], pair[1], path, flat, depth - 1):
                    return True
            elif yours.get("additionalProperties") is False and "patternProperties" not in yours:
                return True
    return False


def _kinds(schema: Schema, path: str) -> set[str]:
    """Types that it may have; every number is a `number`, those whole are `integer` too."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    names = set(types_of(schema, path)) if values is None else {type_of(value) for value in values}
    return names | {"integer"} if "number" in names else names


def _values(schema: Schema) -> set[str] | None:
    if "const" in schema:
        return {key(schema["const"])}
    return {key(value) for value in schema["enum"]} if "enum" in schema else None
