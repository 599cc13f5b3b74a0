"""A grammar of one call in Python's syntax, `f(a=1, b="x")`, made from the arguments' JSON schema.

Values are JSON, which whoever reads such calls takes for Python's literals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.gateway.tools.offer import Tool
from shared.structural_tags import Format, either, literal, perhaps, sequence, tag

PLAIN_KEYS = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "title",
        "description",
        "$defs",
        "definitions",
        "$schema",
    }
)
"""Of a schema whose properties bind one by one. `additionalProperties` may stand there: none are written."""
DEFINITIONS = ("$defs", "definitions")

Value = Callable[[dict[str, Any]], Format]
"""The grammar of a value that fits a schema."""


def expressible(tool: Tool) -> bool:
    """Whether the schema says no more than what each argument may be, and which of them there must be."""
    schema = tool.parameters
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    return (
        PLAIN_KEYS.issuperset(schema)
        and isinstance(required, list)
        and all(isinstance(key, str) and key in properties for key in required)
        and all(key.isidentifier() and value is not False for key, value in properties.items())
    )


def keywords(tool: Tool, value: Value) -> Format:
    """Arguments in the order of the schema's properties; those that are not required may be left out."""
    schema = tool.parameters
    shared = {key: schema[key] for key in DEFINITIONS if key in schema}
    required = set(schema.get("required", ()))
    written: list[tuple[Format, bool]] = []
    for key, described in schema.get("properties", {}).items():
        inner = described if isinstance(described, dict) else {}
        written.append((sequence(literal(f"{key}="), value({**shared, **inner})), key in required))
    return tag(f"{tool.name}(", _listed(written), ")")


def _listed(written: list[tuple[Format, bool]]) -> Format:
    """Separated by commas; each is there or, where it is not required, may be."""
    first = next((i for i, (_, required) in enumerate(written) if required), None)
    if first is None:
        starts = [sequence(written[i][0], *_further(written[i + 1 :])) for i in range(len(written))]
        return perhaps(either(*starts)) if starts else literal("")
    before = [perhaps(sequence(format_, literal(", "))) for format_, _ in written[:first]]
    return sequence(*before, written[first][0], *_further(written[first + 1 :]))


def _further(written: list[tuple[Format, bool]]) -> list[Format]:
    followed = [(sequence(literal(", "), format_), required) for format_, required in written]
    return [format_ if required else perhaps(format_) for format_, required in followed]
