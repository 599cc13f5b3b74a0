"""What the output must match: `response_format`, `structured_outputs` and its older spellings, as a grammar.

Checks shapes and sizes only. Whether a schema or an expression can be compiled is the worker's to say: its refusal
comes back as the request's rejection, and `OutputGrammar.field` names the field that the client used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from services.gateway.api.errors import check_depth, invalid, not_allowed, unsupported
from shared.messages.generation import Grammar
from shared.models.structural_tags import Format, tagged
from shared.models.structural_tags import tag as structural_part
from shared.packing import NOT_DECODED

MAX_GRAMMAR_BYTES = 128 * 1024
"""Size limit of a schema, an expression, a grammar or all choices together: it travels with the request and its
plan."""
MAX_CHOICES = 4096

ANY_OBJECT = {"type": "object", "additionalProperties": True}


class OutputGrammar(NamedTuple):
    """A grammar that the output must match, and the client's field to name where it cannot be compiled."""

    grammar: Grammar
    field: str


class JsonSchemaFields(Struct):
    """The fields of OpenAI's `response_format.json_schema`."""

    name: str
    schema: Any = msgspec.UNSET
    strict: bool | None = None
    """Structured output is always strict; false asks for less than is given."""
    description: str | None = None


class ResponseFormat(Struct):
    """OpenAI's `response_format`; the last three fields are those of a structural tag."""

    type: str
    json_schema: JsonSchemaFields | None = None
    format: Any = None
    structures: Any = None
    triggers: Any = None


class StructuredOutputs(Struct):
    """vLLM's `structured_outputs`. Exactly one of the first six fields is set."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    """Ignored: properties that a schema does not name are only generated where it allows them expressly."""
    disable_fallback: bool | None = None
    """Ignored: there is no other backend to fall back to."""
    whitespace_pattern: str | None = None


class OutputGrammarFields(Protocol):
    """The fields of a request that this module reads."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: Any
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    ignore_eos: bool | None
    allowed_token_ids: list[int] | None


def read_output_grammar(fields: OutputGrammarFields) -> OutputGrammar | None:
    """Returns what the output must match; None where that is anything. Raises RequestError 400."""
    found: list[OutputGrammar | None] = []
    if fields.response_format is not None:
        found.append(_response_format(fields.response_format))
    if fields.structured_outputs is not None:
        found.append(_structured_outputs(fields.structured_outputs))
    for name, field in _LEGACY_FIELDS.items():  # vLLM's names until 0.11
        if (value := getattr(fields, field)) is not None:
            found.append(_READERS[name](value, field))
    grammars = [grammar for grammar in found if grammar is not None]
    if not grammars:
        return None
    if len(grammars) > 1:
        named = " and ".join(grammar.field.split(".")[0] for grammar in grammars)
        raise invalid(grammars[1].field.split(".")[0], f"{named} are not allowed together; one of them is")
    if fields.ignore_eos:
        raise invalid("ignore_eos", f"true is not allowed together with {grammars[0].field}, which says where to end")
    if fields.allowed_token_ids is not None:
        allowed = f"not allowed together with {grammars[0].field}; nothing might be left to draw"
        raise invalid("allowed_token_ids", allowed)
    return grammars[0]


def json_grammar(schema: Any, field: str, *, compact: bool = False) -> OutputGrammar:
    """Returns a grammar for JSON documents that match `schema`, which must be an object. Raises RequestError 400."""
    if not isinstance(schema, dict):
        raise not_allowed(field, schema, "a JSON schema is an object")
    check_depth(field, schema)
    return _bounded(Grammar("json", _compact_json(schema), compact=compact), field)


def structural_grammar(tag: Any, field: str) -> OutputGrammar:
    """Returns a grammar from xgrammar's structural tag: free text with constrained parts. Raises RequestError 400."""
    if not isinstance(tag, dict):
        raise not_allowed(field, tag, "a structural tag is an object")
    check_depth(field, tag)
    return _bounded(Grammar("structural_tag", _compact_json(tag)), field)


def _response_format(requested: ResponseFormat) -> OutputGrammar | None:
    match requested:
        case ResponseFormat(type="text"):
            return None
        case ResponseFormat(type="json_object"):
            return json_grammar(ANY_OBJECT, "response_format")
        case ResponseFormat(type="json_schema"):
            if requested.json_schema is None:
                raise invalid("response_format.json_schema", "this field is required where type is 'json_schema'")
            if requested.json_schema.schema is msgspec.UNSET:
                raise invalid("response_format.json_schema.schema", "this field is required")
            return json_grammar(requested.json_schema.schema, "response_format.json_schema.schema")
        case ResponseFormat(type="structural_tag"):
            parts = (
                ("format", requested.format),
                ("structures", requested.structures),
                ("triggers", requested.triggers),
            )
            given = {name: value for name, value in parts if value is not None}
            return _client_tag({"type": "structural_tag", **given}, "response_format")
        case _:
            allowed = "'text', 'json_object', 'json_schema' or 'structural_tag'"
            raise not_allowed("response_format.type", requested.type, f"{allowed} is")


def _structured_outputs(requested: StructuredOutputs) -> OutputGrammar:
    given = [name for name in _READERS if getattr(requested, name) not in (None, False)]
    if len(given) != 1:
        what = f"{' and '.join(given)} are not allowed together" if given else "empty"
        raise invalid("structured_outputs", f"{what}; exactly one of {', '.join(_READERS)} is allowed")
    if requested.whitespace_pattern is not None:
        raise unsupported("structured_outputs.whitespace_pattern", "a pattern for white space")
    found = _READERS[given[0]](getattr(requested, given[0]), f"structured_outputs.{given[0]}")
    if requested.disable_any_whitespace and found.grammar.kind == "json":
        return OutputGrammar(msgspec.structs.replace(found.grammar, compact=True), found.field)
    return found


def _json(value: Any, field: str) -> OutputGrammar:
    return json_grammar(_parsed(value, field) if isinstance(value, str) else value, field)


def _structural_tag(value: Any, field: str) -> OutputGrammar:
    return _client_tag(_parsed(value, field) if isinstance(value, str) else value, field)


def _client_tag(tag: Any, field: str) -> OutputGrammar:
    """A structural tag in xgrammar's shape, or in the older one that vLLM also accepts: `structures` and `triggers`."""
    if isinstance(tag, dict) and "format" not in tag and "structures" in tag:
        tag = tagged(_triggered(tag["structures"], tag.get("triggers"), field))
    return structural_grammar(tag, field)


def _triggered(structures: Any, triggers: Any, field: str) -> Format:
    if not isinstance(structures, list) or not structures:
        raise not_allowed(f"{field}.structures", structures, "a list of begin, schema and end is")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(text, str) and text for text in triggers):
        raise not_allowed(f"{field}.triggers", triggers, "a list of strings is")
    tags = [_structure(part, f"{field}.structures[{i}]") for i, part in enumerate(structures)]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _structure(part: Any, field: str) -> Format:
    match part:
        case {"begin": str(begin), "schema": dict(schema), "end": str(end)}:
            return structural_part(begin, {"type": "json_schema", "json_schema": schema}, end)
        case _:
            raise not_allowed(field, part, "begin, schema (an object) and end are needed")


def _choice(value: list[str], field: str) -> OutputGrammar:
    if not value:
        raise invalid(field, "[] is not allowed; at least one string is needed")
    if len(value) > MAX_CHOICES:
        raise invalid(field, f"{len(value)} strings are not allowed; at most {MAX_CHOICES}")
    return _bounded(Grammar("choice", _compact_json(value)), field)


_LEGACY_FIELDS = {name: f"guided_{name}" for name in ("json", "regex", "choice", "grammar")}
_READERS: dict[str, Callable[[Any, str], OutputGrammar]] = {
    "json": _json,
    "regex": lambda value, field: _bounded(Grammar("regex", _non_empty(value, field)), field),
    "choice": _choice,
    "grammar": lambda value, field: _bounded(Grammar("grammar", _non_empty(value, field)), field),
    "json_object": lambda _, field: json_grammar(ANY_OBJECT, field),
    "structural_tag": _structural_tag,
}


def _parsed(text: str, field: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except NOT_DECODED as error:
        raise invalid(field, f"not valid JSON ({str(error)[:120]})") from None


def _non_empty(value: str, field: str) -> str:
    if not value.strip():
        raise not_allowed(field, value, "it must not be empty")
    return value


def _compact_json(value: Any) -> str:
    """Gives equal values the same text: white space and escapes do not matter. The order of keys does, as properties
    are generated in that order."""
    return msgspec.json.encode(value).decode()


def _bounded(grammar: Grammar, field: str) -> OutputGrammar:
    size = len(grammar.text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise invalid(field, f"{size} bytes are not allowed; at most {MAX_GRAMMAR_BYTES}")
    return OutputGrammar(grammar, field)
