"""The HTTP API by endpoint, with the fields of each body, from the page that gateways answer at /openapi.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from services.gateway.api.openapi import SCHEMAS, openapi_page
from tests.docs_site.markdown import cell

_HEADING = """\
# HTTP API by field

Every endpoint and every field of its body, as a gateway describes them at `/openapi.json` and, for people, at `/docs`.
What they do is in [API](../api.md). This page is made from the types that bodies are decoded to.

"""
_BOUNDS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "maxLength": "≤ {} characters"}

Schema = Mapping[str, Any]


def page() -> str:
    """The page's text."""
    described = json.loads(openapi_page("0"))
    schemas: Mapping[str, Schema] = described["components"]["schemas"]
    parts, bodies = [_HEADING, "## Endpoints\n", "| | | body |", "|---|---|---|"], dict[str, None]()
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            body = _body(operation)
            bodies |= {body: None} if body else {}
            fields = body and schemas[body].get("properties")
            link = f"[{body}](#{body.lower()})" if fields else ", ".join(f"`?{each}`" for each in _queries(operation))
            parts.append(f"| `{method.upper()} {path}` | {cell(operation['summary'])} | {link} |")
    for name in _reached(bodies, schemas):
        properties = schemas[name].get("properties")
        if properties and name != "Error":
            parts += ["", f"## {name}\n", "| field | type | default |", "|---|---|---|"]
            required = schemas[name].get("required", ())
            parts += [_row(field, each, field in required) for field, each in properties.items()]
    return "\n".join(parts) + "\n"


def _body(operation: Schema) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    return next((str(each["schema"]["$ref"]).removeprefix(SCHEMAS) for each in content.values()), "")


def _queries(operation: Schema) -> Iterator[str]:
    return (each["name"] for each in operation.get("parameters", ()) if each["in"] == "query")


def _reached(names: Iterable[str], schemas: Mapping[str, Schema]) -> Iterator[str]:
    """The schemas, then those that they refer to, each once."""
    waiting, seen = list(names), set[str]()
    for name in waiting:
        if name in seen:
            continue
        seen.add(name)
        yield name
        waiting += list(_references(schemas[name]))


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield str(schema["$ref"]).removeprefix(SCHEMAS)
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            yield from _references(each)


def _row(field: str, schema: Schema, required: bool) -> str:
    default = "must be set" if required else f"`{json.dumps(schema['default'])}`" if "default" in schema else ""
    return f"| `{field}` | {type_of(schema)} | {cell(default)} |"


def type_of(schema: Schema) -> str:
    """In words: `integer ≥ 1 or null`."""
    if "$ref" in schema:
        name = str(schema["$ref"]).removeprefix(SCHEMAS)
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(type_of(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(each)}`" for each in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"array of {type_of(schema['items'])}" if isinstance(schema.get("items"), dict) else "array"
    return " ".join([str(kind), *(text.format(schema[key]) for key, text in _BOUNDS.items() if key in schema)])
