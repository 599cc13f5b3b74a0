"""The JSON schemas within a structural tag, brought into the shapes that the compiler enforces. Pure."""

from __future__ import annotations

import json
from typing import Any

from services.worker.guided.refusal import GrammarRefused
from services.worker.guided.schema.keywords import refuse
from services.worker.guided.schema.normal_form import normal_form

MOST_LEVELS = 128


def enforceable(text: str) -> str:
    """The tag with each of its schemas in normal form. Raises GrammarRefused."""
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(f"not valid JSON ({error})") from None
    return json.dumps(_with_normal_forms(tag, "$"), ensure_ascii=False)


def _with_normal_forms(part: Any, path: str) -> Any:
    if path.count(".") > MOST_LEVELS:
        raise refuse(path, "nested too deeply")
    if isinstance(part, list):
        return [_with_normal_forms(item, f"{path}.{number}") for number, item in enumerate(part)]
    if not isinstance(part, dict):
        return part
    return {
        name: _schema(value, f"{path}.{name}")
        if _holds_schema(part, name)
        else _with_normal_forms(value, f"{path}.{name}")
        for name, value in part.items()
    }


def _holds_schema(part: dict[str, Any], name: str) -> bool:
    """In a format of JSON, and (older) in a structure."""
    return (name == "json_schema" and part.get("type") == "json_schema") or (name == "schema" and "begin" in part)


def _schema(schema: Any, path: str) -> Any:
    try:
        return normal_form(json.loads(schema) if isinstance(schema, str) else schema)
    except ValueError as error:
        raise refuse(path, f"not valid JSON ({error})") from None
    except GrammarRefused as refused:
        raise GrammarRefused(f"{path}: {refused}") from None
