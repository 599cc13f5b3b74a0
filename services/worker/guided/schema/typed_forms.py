"""The keywords of one type (objects, arrays, numbers, strings) in the form that the compiler takes them. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from services.worker.guided.schema.keywords import Schema, assertions, count_of, refuse

Read = Callable[[Any, str], Schema | None]
"""A schema within this one; None where nothing satisfies it."""

_OPEN = ("additionalProperties", "patternProperties", "propertyNames")


def object_form(schema: Schema, path: str, read: Read, *, closed: bool) -> Schema | None:
    """The form of an object; None where there is none. Raises GrammarRefused. `closed`: by unevaluatedProperties.

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
    pattern = checked_pattern(pattern, f"{path}.patternProperties")
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
    """Refuses a minimum of properties, because names that the model chooses may be equal and count once."""
    if counts.get("minProperties", 0) > 1:
        raise refuse(f"{path}.minProperties", "above 1 it is supported only where every property is described")


def _counts(schema: Schema) -> Schema:
    given = {keyword: count_of(schema, keyword) for keyword in ("minProperties", "maxProperties")}
    return {keyword: value for keyword, value in given.items() if value is not None}


# Arrays.


def array_form(schema: Schema, path: str, read: Read, *, closed: bool) -> Schema | None:
    """The form of an array; None where there is no such array. Raises GrammarRefused. `closed`: by unevaluatedItems."""
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


# Numbers.


_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_LARGEST_DIVISOR = 1024
"""The largest `multipleOf` that the compiler supports."""


def number_form(schema: Schema, path: str, *, whole: bool) -> Schema | None:
    """The form of a number; None where there is no such number. Raises GrammarRefused."""
    bounds = {keyword: schema[keyword] for keyword in _BOUNDS if keyword in schema}
    divisor = schema.get("multipleOf")
    if divisor is None:
        return _integer(bounds) if whole else _real(bounds)
    return _multiple(bounds, divisor, path)


def _real(bounds: dict[str, Any]) -> Schema | None:
    low = max((bounds[keyword] for keyword in _BOUNDS[:2] if keyword in bounds), default=-math.inf)
    high = min((bounds[keyword] for keyword in _BOUNDS[2:] if keyword in bounds), default=math.inf)
    return None if low > high else {"type": "number", **bounds}


def _integer(bounds: dict[str, Any]) -> Schema | None:
    lows = [math.ceil(bounds["minimum"])] if "minimum" in bounds else []
    lows += [math.floor(bounds["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in bounds else []
    highs = [math.floor(bounds["maximum"])] if "maximum" in bounds else []
    highs += [math.ceil(bounds["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in bounds else []
    if lows and highs and max(lows) > min(highs):
        return None
    low = {"minimum": max(lows)} if lows else {}
    return {"type": "integer", **low, **({"maximum": min(highs)} if highs else {})}


def _multiple(bounds: dict[str, Any], divisor: Any, path: str) -> Schema | None:
    """Multiples of a whole number are whole numbers."""
    if divisor != int(divisor) or divisor > _LARGEST_DIVISOR:
        raise refuse(f"{path}.multipleOf", f"{divisor!r} is not supported; a whole number to {_LARGEST_DIVISOR} is")
    form = _integer(bounds)
    if form is None or divisor == 1:
        return form
    if bounds:
        raise refuse(f"{path}.multipleOf", "not supported together with bounds")
    return {**form, "multipleOf": int(divisor)}


# Strings, and which regular expressions mean the same when the whole string must match.


_OPAQUE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_OPTIONAL_GROUP = re.compile(rf"(?P<opaque>{_OPAQUE.pattern})|\)\?\??", re.DOTALL)

FORMATS = frozenset(
    {
        "date",
        "time",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
        "uri-reference",
        "uri-template",
    }
)
"""Those that are enforced; others are notes, as the specification has it by default. (Of the compiler's own, those of
JSON pointers let characters through that no JSON string holds.)"""


def string_form(schema: Schema, path: str) -> Schema:
    """A string's keywords as the compiler takes them. Raises GrammarRefused."""
    least, most = count_of(schema, "minLength") or 0, count_of(schema, "maxLength")
    if "pattern" in schema:
        if least or most is not None:
            raise refuse(f"{path}.pattern", "not supported together with minLength or maxLength; say it in the pattern")
        return {"type": "string", "pattern": checked_pattern(schema["pattern"], f"{path}.pattern")}
    if least or most is not None:
        # The compiler's own lengths let control characters through, which no JSON string holds.
        return {"type": "string", "pattern": f"^.{{{least},{'' if most is None else most}}}$"}
    if schema.get("format") in FORMATS:
        return {"type": "string", "format": schema["format"]}
    return {"type": "string"}


def checked_pattern(pattern: str, path: str) -> str:
    """The pattern, if strings that match it as a whole are strings that it is found in. Raises GrammarRefused. Optional
    groups are written as counts: xgrammar 0.2.8 takes `(ab+)?c` of a schema to match `bc`, too; and leaves look-aheads
    out, which it refuses elsewhere."""
    plain = _OPAQUE.sub("x", pattern)
    if "(?=" in plain or "(?!" in plain:
        raise refuse(path, "look-aheads are not supported")
    for place, character in enumerate(plain):
        if character == "^" and plain[:place].strip("(|?:") and plain[place - 1] != "|":
            raise refuse(path, "^ is supported at the beginning only")
        if character == "$" and plain[place + 1 :].strip(")|") and plain[place + 1] != "|":
            raise refuse(path, "$ is supported at the end only")
    return _OPTIONAL_GROUP.sub(lambda found: found["opaque"] or "){0,1}", pattern)
