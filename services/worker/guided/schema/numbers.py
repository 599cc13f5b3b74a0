"""A number's keywords as the compiler takes them. Pure."""

from __future__ import annotations

import math
from typing import Any

from services.worker.guided.schema.keywords import Schema, refuse

_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_LARGEST_DIVISOR = 1024
"""Of the compiler's."""


def number_form(schema: Schema, path: str, *, whole: bool) -> Schema | None:
    """None where there is no such number. Raises GrammarRefused."""
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
