"""Qwen3-Coder's calls: `<function=NAME><parameter=KEY>VALUE</parameter>…</function>`, turned into JSON arguments.

Values stand there without quotation marks, so what one means is decided by the tool's JSON schema, as vLLM does it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from services.gateway.parsing.json_text import as_json
from services.gateway.parsing.pieces import Pieces
from services.gateway.parsing.python_value import python_as_json
from services.gateway.parsing.tape import Emit, NoCall, Reading, Tape

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
NAME = re.compile(r"[^<>\n]*")
VALUE_ENDS = (PARAMETER_END, PARAMETER, FUNCTION_END)
"""A value ends, too, where the next begins: models forget to close them."""


def read_xml_call(tape: Tape, pieces: Pieces, schemas: Mapping[str, Any]) -> Reading[None]:
    """Reads one call, its parameters in their order. Raises NoCall."""
    yield from tape.expect(FUNCTION)
    name = yield from _name(tape)
    parameters = schemas.get(name)
    pieces.begin(name)
    pieces.arguments("{")
    keys: set[str] = set()
    while True:
        yield from tape.space()
        if (yield from tape.expect(PARAMETER, FUNCTION_END)) == FUNCTION_END:
            pieces.arguments("}")
            return
        key = yield from _name(tape)
        if key in keys:
            raise NoCall
        keys.add(key)
        pieces.arguments(f'{", " if len(keys) > 1 else ""}"{as_json(key)}": ')
        yield from _read_argument(tape, pieces.arguments, value_types(parameters, key))


def _name(tape: Tape) -> Reading[str]:
    name = (yield from tape.run(NAME)).strip()
    yield from tape.expect(">")
    if not name:
        raise NoCall
    return name


def _read_argument(tape: Tape, emit: Emit, types: frozenset[str]) -> Reading[None]:
    if types <= {"string"}:
        emit('"')
        text = _WithoutFrame(lambda part: emit(as_json(part)))
        end = yield from tape.until(VALUE_ENDS, text.feed)
        emit('"')
    else:
        parts: list[str] = []
        end = yield from tape.until(VALUE_ENDS, _WithoutFrame(parts.append).feed)
        emit(converted("".join(parts), types))
    if end == PARAMETER_END:
        yield from tape.expect(PARAMETER_END)


class _WithoutFrame:
    """Owns the place in a value whose first and last line breaks are no part of it."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._begun = False
        self._held = ""

    def feed(self, text: str) -> None:
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
        text = self._held + text
        kept = text.removesuffix("\n")
        self._held = text[len(kept) :]
        if kept:
            self._emit(kept)


def value_types(parameters: Any, key: str) -> frozenset[str]:
    """The JSON types that the schema allows for a parameter; none where it does not say, which means text."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    schema = properties.get(key) if isinstance(properties, dict) else None
    return _types(schema, 0)


def _types(schema: Any, depth: int) -> frozenset[str]:
    if not isinstance(schema, dict) or depth > 8:
        return frozenset()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {name for name in _list(named) if isinstance(name, str)}
    for option in (part for key in ("anyOf", "oneOf", "allOf") for part in _list(schema.get(key))):
        types |= _types(option, depth + 1)
    if not types and "enum" in schema:
        types = {"string" if isinstance(value, str) else "other" for value in _list(schema["enum"])}
    return frozenset(types) or frozenset({"other"} if "$ref" in schema or "properties" in schema else ())


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def converted(text: str, types: frozenset[str]) -> str:
    """A value as JSON: as it is where it is some, as Python writes it, or else as text."""
    for read in (_checked_json, python_as_json):
        try:
            value = read(text.strip())
        except (NoCall, ValueError, RecursionError):
            continue
        if "string" not in types or _fits(json.loads(value), types):
            return value
    return f'"{as_json(text)}"'


def _checked_json(text: str) -> str:
    json.loads(text, parse_constant=_no_constant)
    return text


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _fits(value: Any, types: frozenset[str]) -> bool:
    """Whether a value is of a type that the schema names beside text."""
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int():
            return bool(types & {"integer", "number"})
        case float():
            return "number" in types
        case list():
            return "array" in types
        case dict():
            return "object" in types
        case _:
            return False
