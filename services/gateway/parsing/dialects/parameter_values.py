"""Values that models write without quotation marks: what they mean by the schema of their parameter, as in vLLM."""

from __future__ import annotations

import json
import re
from typing import Any

from services.gateway.parsing.dialects.pythonic import python_as_json
from services.gateway.parsing.events import ParseEvents
from services.gateway.parsing.json_calls import as_json
from services.gateway.parsing.text_cursor import Emit, NotAToolCall, Reading, TextCursor


class ArgumentsObject:
    """Writes arguments that come one by one as the JSON object of the open call."""

    def __init__(self, events: ParseEvents, schema: Any) -> None:
        """`schema`: that of all arguments; None where the function is unknown."""
        self._events, self._schema = events, schema
        self._keys: set[str] = set()
        events.arguments("{")

    def add(self, key: str) -> dict[str, Any]:
        """Writes the next key, and returns the schema of its value. Raises NotAToolCall where there is no key, or again
        the same."""
        if not key or key in self._keys:
            raise NotAToolCall
        self._events.arguments(f'{", " if self._keys else ""}"{as_json(key)}": ')
        self._keys.add(key)
        return parameter_schema(self._schema, key)

    def close(self) -> None:
        """Writes the object's end."""
        self._events.arguments("}")


def read_argument(
    cursor: TextCursor, emit: Emit, schema: dict[str, Any], ends: tuple[str, ...], *, lines: bool
) -> Reading[str]:
    """Reads a value up to one of `ends`, passes it to `emit` as JSON, and returns that end unread.

    `lines`: a line break at either end belongs to the markup, not to the value. Raises OutputEnd where no end comes."""
    if not is_free_text(schema):
        parts: list[str] = []
        end = yield from cursor.read_until(ends, parts.append)
        emit(converted("".join(parts), schema))
        return end

    def escaped(part: str) -> None:
        emit(as_json(part))

    emit('"')
    end = yield from cursor.read_until(ends, _TrimmedLines(escaped).feed if lines else escaped)
    emit('"')
    return end


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
