"""How two schemas go together: merged into one that says both (`allOf`, and keywords beside `$ref`, `anyOf`, `oneOf`),
or found to exclude each other (what `oneOf` asks for, and `anyOf` does not). Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import lcm
from typing import Any

from services.worker.guided.schema.keywords import UNEVALUATED, Schema, refuse, type_of, types_of, value_key

_LARGEST = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_SMALLEST = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})
_OPENING = ("additionalProperties", "patternProperties", "propertyNames")


class Contradiction(Exception):
    """No value satisfies both schemas."""


def merge_schemas(one: Schema, other: Schema, path: str) -> Schema:
    """One schema that says both. Raises Contradiction, and GrammarRefused where one schema cannot say both."""
    if one and other and UNEVALUATED & (one.keys() | other.keys()):
        keyword = min(UNEVALUATED & (one.keys() | other.keys()))
        raise refuse(f"{path}.{keyword}", "not supported together with another schema")
    one, other = _confined(one, other, path), _confined(other, one, path)
    _check_items(one, other, path)
    result = dict(one)
    for keyword, value in other.items():
        result[keyword] = _both(keyword, one, value, path) if keyword in one else value
    return result


def _both(keyword: str, one: Schema, value: Any, path: str) -> Any:
    mine = one[keyword]
    if mine == value and type(mine) is type(value):
        return mine
    if keyword in _LARGEST:
        return max(mine, value)
    if keyword in _SMALLEST:
        return min(mine, value)
    match keyword:
        case "required":
            return list(dict.fromkeys([*mine, *value]))
        case "properties":
            return {**mine, **{name: _either(mine, name, schema) for name, schema in value.items()}}
        case "items":
            return {"allOf": [mine, value]}
        case "type":
            return _common_types(mine, value, path)
        case "enum":
            return [item for item in mine if value_key(item) in {value_key(other) for other in value}]
        case "const":
            raise Contradiction
        case "uniqueItems":
            return mine or value
        case "format":
            return mine
        case "multipleOf" if isinstance(mine, int) and isinstance(value, int):
            return lcm(mine, value)
        case "additionalProperties" if True in (mine, value):
            return value if mine is True else mine
        case _:
            raise refuse(f"{path}.{keyword}", "given twice (by allOf, or beside $ref, anyOf or oneOf): not supported")


def _either(mine: Schema, name: str, schema: Any) -> Any:
    return {"allOf": [mine[name], schema]} if name in mine and mine[name] != schema else schema


def _common_types(mine: Any, value: Any, path: str) -> list[str]:
    one, other = types_of({"type": mine}, path), types_of({"type": value}, path)
    common = [name for name in one if name in other]
    if {"number", "integer"} <= {*one, *other} and not {"number", "integer"} & set(common):
        common.append("integer")
    if not common:
        raise Contradiction
    return common


def _confined(one: Schema, other: Schema, path: str) -> Schema:
    """`one` without the properties that `other` rules out: what one side says of all others concerns the other's."""
    if one.get("additionalProperties", True) is not False and not any(
        isinstance(other.get(keyword), dict) for keyword in _OPENING
    ):
        return _closed_by(one, other)
    if any(isinstance(other.get(keyword), dict) for keyword in _OPENING) and "properties" in one:
        keyword = next(keyword for keyword in _OPENING if isinstance(other.get(keyword), dict))
        raise refuse(f"{path}.{keyword}", "not supported together with another schema's properties")
    return _closed_by(one, other)


def _closed_by(one: Schema, other: Schema) -> Schema:
    if other.get("additionalProperties", True) is not False or "properties" not in one:
        return one
    allowed = other.get("properties", {})
    return {**one, "properties": {name: schema for name, schema in one["properties"].items() if name in allowed}}


def _check_items(one: Schema, other: Schema, path: str) -> None:
    """What `items` concerns depends on the `prefixItems` beside it."""
    ordered = [side for side in (one, other) if "prefixItems" in side or isinstance(side.get("items"), list)]
    sides = [side for side in (one, other) if "items" in side or "prefixItems" in side]
    if ordered and len(sides) > 1:
        raise refuse(f"{path}.prefixItems", "not supported together with another schema's items")


# Whether at most one of two schemas can hold.


Flat = Callable[[Any], Schema | None]
"""A schema without `$ref` and `allOf`; None where nothing satisfies it."""

_DEPTH = 3
"""Properties within properties that are looked at."""


def mutually_exclusive(branches: list[Schema], path: str, flat: Flat) -> bool:
    """Whether any two of `branches`, which are flat, certainly exclude each other."""
    return all(_exclude(one, other, path, flat, _DEPTH) for one, other in combinations(branches, 2))


def _exclude(one: Schema, other: Schema, path: str, flat: Flat, depth: int) -> bool:
    kinds, others = _kinds(one, path), _kinds(other, path)
    if not kinds & others:
        return True
    mine, yours = _values(one), _values(other)
    if mine is not None and yours is not None and not mine & yours:
        return True
    return depth > 0 and kinds & others == {"object"} and _are_disjoint(one, other, path, flat, depth)


def _are_disjoint(one: Schema, other: Schema, path: str, flat: Flat, depth: int) -> bool:
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
        return {value_key(schema["const"])}
    return {value_key(value) for value in schema["enum"]} if "enum" in schema else None
