"""JSON bodies to structs, strictly; every refusal names the field, its value, and what is allowed."""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

import msgspec

from services.gateway.api.errors import ApiError, invalid, shown

T = TypeVar("T")

_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<key>key in )?\$(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]+)`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
MAX_DEPTH = 64
"""Levels of lists and objects within a field that is passed on as it is."""


def read(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The body as the decoder's type. Raises ApiError 400."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _mistyped(body, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(body, error) from None


def check_depth(field: str, value: Any, depth: int = 0) -> None:
    """Refuses what is nested so deeply that it might not get through the next encoder. Raises ApiError 400."""
    if depth > MAX_DEPTH:
        raise invalid(field, f"nested too deeply; at most {MAX_DEPTH} levels are allowed")
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return
    for item in value:
        check_depth(field, item, depth + 1)


def _mistyped(body: bytes, text: str) -> ApiError:
    match = _AT.match(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    path = path.partition("[...]")[0]  # an object's values, of which it does not say which
    if missing := _MISSING.search(what):
        field = f"{path.lstrip('.')}.{missing['field']}".lstrip(".")
        return invalid(field, "this field is required")
    if not path:
        return invalid("body", what[:1].lower() + what[1:])
    value = _value_at(body, path)
    given = f"{shown(value[0])} is not allowed; " if value is not None else ""
    return invalid(path.lstrip("."), given + what[:1].lower() + what[1:])


def _value_at(body: bytes, path: str) -> tuple[Any] | None:
    """The value that lies at msgspec's `path`, as far as it can be followed."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    position = 0
    for step in _STEP.finditer(path):
        if step.start() != position:
            return None
        position = step.end()
        try:
            value = value[step[1]] if step[1] is not None else value[int(step[2])]
        except (KeyError, IndexError, TypeError):
            return None
    return (value,) if position == len(path) else None


def _malformed(body: bytes, error: Exception) -> ApiError:
    """JSON that the strict decoder refuses. The lenient one may still tell which field is to blame."""
    try:
        lenient = json.loads(body)
    except (ValueError, RecursionError):
        return invalid("body", f"not valid JSON ({str(error)[:120]})")
    path = _foreign(lenient, "", 0)
    if path is None:
        return invalid("body", f"not valid JSON ({str(error)[:120]})")
    return invalid(path or "body", "NaN, Infinity and lone surrogates are not allowed in JSON")


def _foreign(value: Any, path: str, depth: int) -> str | None:
    """The path of the first value that strict JSON in UTF-8 cannot hold."""
    if depth > MAX_DEPTH:
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    if isinstance(value, str):
        return None if value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value) else path
    if isinstance(value, list):
        items: Any = ((f"{path}[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        if any(_foreign(key, path, depth + 1) is not None for key in value):
            return path
        items = ((f"{path}.{key}".lstrip("."), item) for key, item in value.items())
    else:
        return None
    return next((found for where, item in items if (found := _foreign(item, where, depth + 1)) is not None), None)
