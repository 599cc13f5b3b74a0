"""An object's keywords as the compiler takes them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.worker.guided.schema.keywords import Schema, assertions, count_of, refuse
from services.worker.guided.schema.patterns import checked_pattern, string_form

Read = Callable[[Any, str], Schema | None]
"""A schema within this one; None where nothing satisfies it."""

_OPEN = ("additionalProperties", "patternProperties", "propertyNames")


def object_form(schema: Schema, path: str, read: Read, *, closed: bool) -> Schema | None:
    """None where there is no such object. Raises GrammarRefused. `closed`: by unevaluatedProperties.

    Properties that nobody names are generated only where the schema says so, or says nothing of properties at all.
    """
    properties, required = schema.get("properties", {}), list(dict.fromkeys(schema.get("required", [])))
    counts = _counts(schema)
    opening = [keyword for keyword in _OPEN if keyword in schema]
    if not (properties or required or opening or closed):
        return {"type": "object", "additionalProperties": True, **counts}
    if "patternProperties" in opening or "propertyNames" in opening:
        return _by_name(schema, path, read, properties, required, counts)
    rest = read(schema.get("additionalProperties", False), f"{path}.additionalProperties")
    forms: Schema = {}
    for name, value in _with_missing(schema, properties, required).items():
        form = read(value, f"{path}.properties.{name}")
        if form is not None:
            forms[name] = form
        elif name in required:
            return None
    if rest is not None:
        _check_least(counts, path)
    return {
        "type": "object",
        "properties": forms,
        "required": required,
        "additionalProperties": False if rest is None else rest or True,
        **counts,
    }


def _with_missing(schema: Schema, properties: Schema, required: list[str]) -> Schema:
    """The properties, and those that are required without being described."""
    others = schema.get("additionalProperties", True)
    return {**properties, **{name: others for name in required if name not in properties}}


def _by_name(
    schema: Schema, path: str, read: Read, properties: Schema, required: list[str], counts: Schema
) -> Schema | None:
    """Objects whose names follow one pattern."""
    keyword = "patternProperties" if "patternProperties" in schema else "propertyNames"
    if properties or required or ("patternProperties" in schema and "propertyNames" in schema):
        raise refuse(f"{path}.{keyword}", "not supported together with other properties")
    _check_least(counts, path)
    if keyword == "propertyNames":
        name = string_form(_name_schema(schema["propertyNames"], path), f"{path}.propertyNames")
        rest = read(schema.get("additionalProperties", True), f"{path}.additionalProperties")
        if rest is None:
            return {"type": "object", "additionalProperties": False, **counts}
        return {"type": "object", "propertyNames": name, "additionalProperties": rest or True, **counts}
    patterns = schema["patternProperties"]
    if schema.get("additionalProperties", False) is not False or len(patterns) != 1:
        raise refuse(f"{path}.patternProperties", "one pattern is supported, without additionalProperties beside it")
    pattern, value = next(iter(patterns.items()))
    form = read(value, f"{path}.patternProperties.{pattern}")
    checked_pattern(pattern, f"{path}.patternProperties")
    if form is None:
        return {"type": "object", "additionalProperties": False, **counts}
    return {"type": "object", "patternProperties": {pattern: form}, "additionalProperties": False, **counts}


def _name_schema(names: Any, path: str) -> Schema:
    if isinstance(names, bool) or names.get("type", "string") != "string":
        raise refuse(f"{path}.propertyNames", "a schema of strings is needed")
    asked = assertions(names, f"{path}.propertyNames")
    for keyword in asked:
        if keyword in ("enum", "const", "$ref", "allOf", "anyOf", "oneOf"):
            raise refuse(f"{path}.propertyNames.{keyword}", "not supported; pattern, minLength and maxLength are")
    return asked


def _check_least(counts: Schema, path: str) -> None:
    """Of names that the model chooses some may be equal, and count once."""
    if counts.get("minProperties", 0) > 1:
        raise refuse(f"{path}.minProperties", "above 1 it is supported only where every property is described")


def _counts(schema: Schema) -> Schema:
    given = {keyword: count_of(schema, keyword) for keyword in ("minProperties", "maxProperties")}
    return {keyword: value for keyword, value in given.items() if value is not None}
