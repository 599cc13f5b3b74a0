"""Two schemas that must both hold, as one: for `allOf`, and for keywords beside `$ref`, `anyOf` and `oneOf`. Pure."""

from __future__ import annotations

from math import lcm
from typing import Any

from services.worker.guided.schema.keywords import UNEVALUATED, Schema, refuse, types_of
from services.worker.guided.schema.values import key

_LARGEST = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_SMALLEST = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})
_OPENING = ("additionalProperties", "patternProperties", "propertyNames")


class Contradiction(Exception):
    """Nothing satisfies both."""


def merged(one: Schema, other: Schema, path: str) -> Schema:
    """Raises Contradiction, and GrammarRefused where one schema cannot say both."""
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
            return [item for item in mine if key(item) in {key(other) for other in value}]
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
