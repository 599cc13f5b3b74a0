"""What clients may ask their output to match, and the field that a refusal names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.api.chat import read_chat
from services.gateway.api.completions import read_completion
from services.gateway.api.errors import RequestError
from services.gateway.api.generation import RequestLimits
from services.gateway.api.structured_outputs import MAX_CHOICES, MAX_GRAMMAR_BYTES, OutputGrammar, json_grammar
from shared.ids import ModelName
from shared.messages.generation import Grammar
from shared.messages.model_card import ModelCard

CARD = ModelCard(
    name=ModelName("m"), max_model_len=256, vocab_size=2048, eos_token_ids=(0,), dtype="float32", created=0
)
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["a"]}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}},"required":["a"]}'
JSON_OBJECT = Grammar("json", '{"type":"object","additionalProperties":true}')


def guided(**fields: Any) -> OutputGrammar | None:
    """The same from both endpoints."""
    chat = read_chat(
        json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode(), [CARD], RequestLimits()
    )
    completion = read_completion(json.dumps({"prompt": "x", **fields}).encode(), [CARD], RequestLimits())
    assert chat.output_grammar == completion.output_grammar
    return chat.output_grammar


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        guided(**fields)
    assert caught.value.status == 400
    return caught.value


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", **fields}}


ACCEPTED: list[tuple[dict[str, Any], OutputGrammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "structured_outputs": None, "guided_json": None}, None),
    ({"response_format": {"type": "json_object"}}, OutputGrammar(JSON_OBJECT, "response_format")),
    (
        {"response_format": json_schema(schema=SCHEMA, strict=True, description="d")},
        OutputGrammar(Grammar("json", SCHEMA_TEXT), "response_format.json_schema.schema"),
    ),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
        OutputGrammar(
            Grammar("structural_tag", '{"type":"structural_tag","format":{"type":"any_text"}}'), "response_format"
        ),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, OutputGrammar(Grammar("json", SCHEMA_TEXT), "structured_outputs.json")),
    (
        {"structured_outputs": {"json": json.dumps(SCHEMA, indent=2), "disable_any_whitespace": True}},
        OutputGrammar(Grammar("json", SCHEMA_TEXT, compact=True), "structured_outputs.json"),
    ),
    ({"structured_outputs": {"json_object": True}}, OutputGrammar(JSON_OBJECT, "structured_outputs.json_object")),
    ({"structured_outputs": {"regex": "a+"}}, OutputGrammar(Grammar("regex", "a+"), "structured_outputs.regex")),
    (
        {"structured_outputs": {"choice": ["yes", "nö"], "json_object": False}},
        OutputGrammar(Grammar("choice", '["yes","nö"]'), "structured_outputs.choice"),
    ),
    (
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
        OutputGrammar(Grammar("grammar", 'root ::= "a"'), "structured_outputs.grammar"),
    ),
    (
        {"structured_outputs": {"structural_tag": '{"type": "structural_tag"}'}},
        OutputGrammar(Grammar("structural_tag", '{"type":"structural_tag"}'), "structured_outputs.structural_tag"),
    ),
    ({"guided_json": SCHEMA}, OutputGrammar(Grammar("json", SCHEMA_TEXT), "guided_json")),
    ({"guided_json": json.dumps(SCHEMA)}, OutputGrammar(Grammar("json", SCHEMA_TEXT), "guided_json")),
    ({"guided_regex": "a"}, OutputGrammar(Grammar("regex", "a"), "guided_regex")),
    ({"guided_choice": ["a"]}, OutputGrammar(Grammar("choice", '["a"]'), "guided_choice")),
    ({"guided_grammar": 'root ::= "a"'}, OutputGrammar(Grammar("grammar", 'root ::= "a"'), "guided_grammar")),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": 5}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    ({"response_format": json_schema()}, "response_format.json_schema.schema"),
    ({"response_format": json_schema(schema="x")}, "response_format.json_schema.schema"),
    ({"response_format": json_schema(schema=None)}, "response_format.json_schema.schema"),
    ({"response_format": json_schema(schema=SCHEMA, strict="yes")}, "response_format.json_schema.strict"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": []}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": " "}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"choice": ["a"] * (MAX_CHOICES + 1)}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": True}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"structural_tag": 5}}, "structured_outputs.structural_tag"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_regex": ["a"]}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"guided_regex": "a", "allowed_token_ids": [1, 2]}, "allowed_token_ids"),
]


@pytest.mark.parametrize(("fields", "expected"), ACCEPTED, ids=lambda value: str(value)[:60])
def test_both_endpoints_read_what_output_must_match(fields: dict[str, Any], expected: OutputGrammar | None) -> None:
    assert guided(**fields) == expected


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_refusal_names_the_field(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert param in error.message


def test_equal_schemas_have_equal_texts_however_they_were_written() -> None:
    spaced = json.loads('{ "type" : "string",  "const": "\\u00e9" }')
    assert json_grammar(spaced, "f") == json_grammar({"type": "string", "const": "é"}, "f")


def test_a_schema_nested_without_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100):
        schema = {"items": schema}
    assert "nested too deeply" in refused(guided_json=schema).message
