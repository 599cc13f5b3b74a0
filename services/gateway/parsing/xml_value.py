"""What a value without quotation marks means: decided by its parameter's JSON schema."""

from __future__ import annotations

import json
import re
from typing import Any

from services.gateway.parsing.json_text import as_json
from services.gateway.parsing.python_value import python_as_json
from services.gateway.parsing.tape import NoCall

BOUNDS = frozenset({"pattern", "format", "minLength", "maxLength"})
MOST_LEVELS = 8
"""Of references and choices within one another that are followed."""
FRAME = re.compile(r"\s?(.*?)\s?", re.DOTALL)


def parameter_schema(parameters: Any, key: str) -> dict[str, Any]:
    """The schema of one parameter, references within the document followed; empty where it says nothing."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    schema = properties.get(key) if isinstance(properties, dict) else None
    for _ in range(MOST_LEVELS):
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
    """Whether the value is a text, whatever it is; a schema that says nothing means that."""
    return value_types(schema) <= {"string"} and BOUNDS.isdisjoint(schema) and not _choices(schema)


def value_types(schema: Any, level: int = 0) -> frozenset[str]:
    """The JSON types that the schema names; none where it names none."""
    if not isinstance(schema, dict) or level > MOST_LEVELS:
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
    """A value as JSON: the choice that it names, JSON or Python's literal where the schema has other types than text,
    or else text."""
    stripped, types = text.strip(), value_types(schema)
    for choice in _choices(schema):
        if stripped == (choice.strip() if isinstance(choice, str) else json.dumps(choice)):
            return json.dumps(choice, ensure_ascii=False)
    for read in (_checked_json, python_as_json) if types - {"string"} else ():
        try:
            value = read(stripped)
            if "string" not in types or _fits(json.loads(value), types):
                return value
        except (NoCall, ValueError, RecursionError):
            continue
    return f'"{as_json(_unframed(text, schema))}"'


def _unframed(text: str, schema: dict[str, Any]) -> str:
    """A text with bounds may have been written by a grammar, which takes any one white space for the frame."""
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
