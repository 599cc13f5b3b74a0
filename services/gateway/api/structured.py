"""What the output must match: `response_format`, `structured_outputs` and its older spellings, as a grammar.

Checks shapes and sizes only. Whether a schema or an expression can be compiled is the worker's to say: its refusal
comes back as the request's rejection, and `Guided.field` says what the client called the thing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from services.gateway.api.errors import ApiError, invalid, shown, unsupported
from services.gateway.api.reading import check_depth
from shared.messages.generation import Grammar
from shared.structural_tags import Format, tagged
from shared.structural_tags import tag as structural_part

MAX_GRAMMAR_BYTES = 128 * 1024
"""Of a schema, an expression, a grammar or all choices together. It travels with the request and in a plan."""
MAX_CHOICES = 4096

ANY_OBJECT = {"type": "object", "additionalProperties": True}


class Guided(NamedTuple):
    """A grammar, and the client's field to name where it turns out to be unusable."""

    grammar: Grammar
    field: str


class JsonSchemaFields(Struct):
    name: str
    schema: Any = msgspec.UNSET
    strict: bool | None = None
    """Guided decoding is always strict; false asks for less than is given."""
    description: str | None = None


class ResponseFormat(Struct):
    type: str
    json_schema: JsonSchemaFields | None = None
    format: Any = None
    structures: Any = None
    triggers: Any = None


class StructuredOutputs(Struct):
    """vLLM's field. Exactly one of the first six."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    """Properties that a schema does not name are never generated unless it allows them expressly, so both will do."""
    disable_fallback: bool | None = None
    """There is no other backend to fall back to."""
    whitespace_pattern: str | None = None


class GuidedFields(Protocol):
    """The fields of a request that this module reads."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: Any
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    ignore_eos: bool | None
    allowed_token_ids: list[int] | None


def read_guided(fields: GuidedFields) -> Guided | None:
    """What the client wants its output to match. Raises ApiError 400."""
    asked = [found for found in (_response_format(fields), _structured_outputs(fields), *_older(fields)) if found]
    if not asked:
        return None
    if len(asked) > 1:
        named = " and ".join(found.field.split(".")[0] for found in asked)
        raise invalid(asked[1].field.split(".")[0], f"{named} are not allowed together; one of them is")
    if fields.ignore_eos:
        raise invalid("ignore_eos", f"true is not allowed together with {asked[0].field}, which says where to end")
    if fields.allowed_token_ids is not None:
        raise invalid("allowed_token_ids", f"not allowed together with {asked[0].field}; nothing might be left to draw")
    return asked[0]


def json_guided(schema: Any, field: str, *, compact: bool = False) -> Guided:
    """Output is a JSON document that `schema` (an object) describes. Raises ApiError 400."""
    if not isinstance(schema, dict):
        raise invalid(field, f"{shown(schema)} is not allowed; a JSON schema is an object")
    check_depth(field, schema)
    return _bounded(Grammar("json", _compact_json(schema), compact=compact), field)


def structural_guided(tag: Any, field: str) -> Guided:
    """Output follows xgrammar's structural tag: free text with parts that grammars bind. Raises ApiError 400."""
    if not isinstance(tag, dict):
        raise invalid(field, f"{shown(tag)} is not allowed; a structural tag is an object")
    check_depth(field, tag)
    return _bounded(Grammar("structural_tag", _compact_json(tag)), field)


def _response_format(fields: GuidedFields) -> Guided | None:
    wanted = fields.response_format
    match wanted:
        case None | ResponseFormat(type="text"):
            return None
        case ResponseFormat(type="json_object"):
            return json_guided(ANY_OBJECT, "response_format")
        case ResponseFormat(type="json_schema"):
            if wanted.json_schema is None:
                raise invalid("response_format.json_schema", "this field is required where type is 'json_schema'")
            if wanted.json_schema.schema is msgspec.UNSET:
                raise invalid("response_format.json_schema.schema", "this field is required")
            return json_guided(wanted.json_schema.schema, "response_format.json_schema.schema")
        case ResponseFormat(type="structural_tag"):
            parts = (("format", wanted.format), ("structures", wanted.structures), ("triggers", wanted.triggers))
            given = {name: value for name, value in parts if value is not None}
            return _clients_tag({"type": "structural_tag", **given}, "response_format")
        case _:
            allowed = "'text', 'json_object', 'json_schema' or 'structural_tag'"
            raise invalid("response_format.type", f"{shown(wanted.type)} is not allowed; {allowed} is")


def _structured_outputs(fields: GuidedFields) -> Guided | None:
    wanted = fields.structured_outputs
    if wanted is None:
        return None
    given = [name for name in _READERS if getattr(wanted, name) not in (None, False)]
    if len(given) != 1:
        what = f"{' and '.join(given)} are not allowed together" if given else "empty"
        raise invalid("structured_outputs", f"{what}; exactly one of {', '.join(_READERS)} is allowed")
    if wanted.whitespace_pattern is not None:
        raise unsupported("structured_outputs.whitespace_pattern", "a pattern for white space")
    found = _READERS[given[0]](getattr(wanted, given[0]), f"structured_outputs.{given[0]}")
    if wanted.disable_any_whitespace and found.grammar.kind == "json":
        return Guided(msgspec.structs.replace(found.grammar, compact=True), found.field)
    return found


def _older(fields: GuidedFields) -> list[Guided | None]:
    """`guided_json` and its like, vLLM's names until 0.11."""
    names = ("json", "regex", "choice", "grammar")
    values = {name: getattr(fields, f"guided_{name}") for name in names}
    return [_READERS[name](value, f"guided_{name}") for name, value in values.items() if value is not None]


def _json(value: Any, field: str) -> Guided:
    return json_guided(_parsed(value, field) if isinstance(value, str) else value, field)


def _json_object(_: bool, field: str) -> Guided:
    return json_guided(ANY_OBJECT, field)


def _structural_tag(value: Any, field: str) -> Guided:
    return _clients_tag(_parsed(value, field) if isinstance(value, str) else value, field)


def _clients_tag(tag: Any, field: str) -> Guided:
    """A structural tag in xgrammar's shape, or in the older one that vLLM takes, too: `structures` and `triggers`."""
    if isinstance(tag, dict) and "format" not in tag and "structures" in tag:
        tag = tagged(_triggered(tag["structures"], tag.get("triggers"), field))
    return structural_guided(tag, field)


def _triggered(structures: Any, triggers: Any, field: str) -> Format:
    if not isinstance(structures, list) or not structures:
        raise invalid(f"{field}.structures", f"{shown(structures)} is not allowed; a list of begin, schema and end is")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(text, str) and text for text in triggers):
        raise invalid(f"{field}.triggers", f"{shown(triggers)} is not allowed; a list of strings is")
    tags = [_behind_begin(part, f"{field}.structures[{i}]") for i, part in enumerate(structures)]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _behind_begin(part: Any, field: str) -> Format:
    match part:
        case {"begin": str(begin), "schema": dict(schema), "end": str(end)}:
            return structural_part(begin, {"type": "json_schema", "json_schema": schema}, end)
        case _:
            raise invalid(field, f"{shown(part)} is not allowed; begin, schema (an object) and end are needed")


def _regex(value: str, field: str) -> Guided:
    return _bounded(Grammar("regex", _non_empty(value, field)), field)


def _grammar(value: str, field: str) -> Guided:
    return _bounded(Grammar("grammar", _non_empty(value, field)), field)


def _choice(value: list[str], field: str) -> Guided:
    if not value:
        raise invalid(field, "[] is not allowed; at least one string is needed")
    if len(value) > MAX_CHOICES:
        raise invalid(field, f"{len(value)} strings are not allowed; at most {MAX_CHOICES}")
    return _bounded(Grammar("choice", _compact_json(value)), field)


_READERS: dict[str, Callable[[Any, str], Guided]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
    "structural_tag": _structural_tag,
}


def _parsed(text: str, field: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(field, f"not valid JSON ({str(error)[:120]})") from None


def _non_empty(value: str, field: str) -> str:
    if not value.strip():
        raise invalid(field, f"{shown(value)} is not allowed; it must not be empty")
    return value


def _compact_json(value: Any) -> str:
    """One text for equal values: white space and escapes do not matter. The order of keys does, as it is the order in
    which properties are generated."""
    return msgspec.json.encode(value).decode()


def _bounded(grammar: Grammar, field: str) -> Guided:
    size = len(grammar.text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise _too_long(field, size)
    return Guided(grammar, field)


def _too_long(field: str, size: int) -> ApiError:
    return invalid(field, f"{size} bytes are not allowed; at most {MAX_GRAMMAR_BYTES}")
