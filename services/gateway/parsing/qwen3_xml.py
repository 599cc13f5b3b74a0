"""Qwen3-Coder's calls: `<function=NAME><parameter=KEY>VALUE</parameter>…</function>`, turned into JSON arguments.

Values are written without quotation marks, so the tool's JSON schema decides what a value means, as in vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from services.gateway.parsing.events import ParseEvents
from services.gateway.parsing.json_calls import as_json
from services.gateway.parsing.pythonic import python_as_json
from services.gateway.parsing.text_cursor import Emit, NotAToolCall, Reading, TextCursor

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
NAME = re.compile(r"[^<>\n]*")
VALUE_ENDS = (PARAMETER_END, PARAMETER, FUNCTION_END)
"""A value also ends where the next one starts: models forget to close them."""


def read_xml_call(cursor: TextCursor, events: ParseEvents, schemas: Mapping[str, Any]) -> Reading[None]:
    """Reads one call; `schemas` are those of all functions. Raises NotAToolCall."""
    yield from cursor.expect(FUNCTION)
    name = yield from _name(cursor)
    parameters = schemas.get(name)
    events.start_call(name)
    events.arguments("{")
    keys: set[str] = set()
    while True:
        yield from cursor.skip_whitespace()
        if (yield from cursor.expect(PARAMETER, FUNCTION_END)) == FUNCTION_END:
            events.arguments("}")
            return
        key = yield from _name(cursor)
        if key in keys:
            raise NotAToolCall
        keys.add(key)
        events.arguments(f'{", " if len(keys) > 1 else ""}"{as_json(key)}": ')
        yield from _read_argument(cursor, events.arguments, parameter_schema(parameters, key))


def _name(cursor: TextCursor) -> Reading[str]:
    name = (yield from cursor.read_run(NAME)).strip()
    yield from cursor.expect(">")
    if not name:
        raise NotAToolCall
    return name


def _read_argument(cursor: TextCursor, emit: Emit, schema: dict[str, Any]) -> Reading[None]:
    if is_free_text(schema):
        emit('"')
        text = _TrimmedLines(lambda part: emit(as_json(part)))
        end = yield from cursor.read_until(VALUE_ENDS, text.feed)
        emit('"')
    else:
        parts: list[str] = []
        end = yield from cursor.read_until(VALUE_ENDS, parts.append)
        emit(converted("".join(parts), schema))
    if end == PARAMETER_END:
        yield from cursor.expect(PARAMETER_END)


class _TrimmedLines:
    """Removes the first and the last line break of a value that arrives in parts."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._started = False
        self._held = ""

    def feed(self, text: str) -> None:
        if not self._started:
            self._started = True
            text = text.removeprefix("\n")
        text = self._held + text
        kept = text.removesuffix("\n")
        self._held = text[len(kept) :]
        if kept:
            self._emit(kept)


BOUNDS = frozenset({"pattern", "format", "minLength", "maxLength"})
MAX_SCHEMA_DEPTH = 8
"""Levels of nested references and alternatives that are followed."""
FRAME = re.compile(r"\s?(.*?)\s?", re.DOTALL)


def parameter_schema(parameters: Any, key: str) -> dict[str, Any]:
    """Returns the schema of one parameter with references inside the document resolved; empty where there is none."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    schema = properties.get(key) if isinstance(properties, dict) else None
    for _ in range(MAX_SCHEMA_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = _referred(parameters, schema["$ref"])
    return schema if isinstance(schema, dict) else {}


def _referred(document: Any, reference: Any) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for step in reference[2:].split("/"):
        document = document.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(document, dict) else None
    return document


def is_free_text(schema: dict[str, Any]) -> bool:
    """Whether any value is text under this schema; a schema that says nothing means that."""
    return value_types(schema) <= {"string"} and BOUNDS.isdisjoint(schema) and not _choices(schema)


def value_types(schema: Any, level: int = 0) -> frozenset[str]:
    """Returns the JSON types that the schema names, those of its alternatives included; empty where it names none."""
    if not isinstance(schema, dict) or level > MAX_SCHEMA_DEPTH:
        return frozenset()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {name for name in _list(named) if isinstance(name, str)}
    for option in (part for key in ("anyOf", "oneOf", "allOf") for part in _list(schema.get(key))):
        types |= value_types(option, level + 1)
    return frozenset(types) or frozenset({"any"} if schema.keys() & {"$ref", "properties", "items"} else ())


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _choices(schema: dict[str, Any]) -> list[Any]:
    return [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]


def converted(text: str, schema: dict[str, Any]) -> str:
    """Returns a value as JSON: the choice that it names; a JSON or Python literal where the schema allows other types
    than text; otherwise text."""
    stripped, types = text.strip(), value_types(schema)
    for choice in _choices(schema):
        if stripped == (choice.strip() if isinstance(choice, str) else json.dumps(choice)):
            return json.dumps(choice, ensure_ascii=False)
    for read in (_checked_json, python_as_json) if types - {"string"} else ():
        try:
            value = read(stripped)
            if "string" not in types or _fits(json.loads(value), types):
                return value
        except (NotAToolCall, ValueError, RecursionError):
            continue
    return f'"{as_json(_unframed(text, schema))}"'


def _unframed(text: str, schema: dict[str, Any]) -> str:
    """A text with bounds may have been written under a grammar, which allows any one white space around it."""
    if BOUNDS.isdisjoint(schema):
        return text.removeprefix("\n").removesuffix("\n")
    match = FRAME.fullmatch(text)
    return text if match is None else match[1]


def _checked_json(text: str) -> str:
    json.loads(text, parse_constant=_no_constant)
    return text


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _fits(value: Any, types: frozenset[str]) -> bool:
    """Whether a value has one of the types that the schema names beside text."""
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
