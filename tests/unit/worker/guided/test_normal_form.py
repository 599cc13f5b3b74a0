"""JSON schemas as the grammar compiler takes them: what comes out of a grammar satisfies the schema, or the schema is
refused with the place of what cannot be enforced."""

from __future__ import annotations

import contextlib
import json
import re
from random import Random
from typing import Any

import jsonschema
import pytest

from services.worker.guided.schema.keywords import GrammarRefused
from services.worker.guided.schema.normal_form import normal_form
from shared.messages.generation import Grammar
from tests.support.worker.guided_documents import RandomWriter, cases, practical

DOCUMENTS = 3
"""Written for each schema that compiles."""

INTEGER, STRING = {"type": "integer"}, {"type": "string"}


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> RandomWriter:
    return RandomWriter(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def either(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> RandomWriter:
    """By either back end: llguidance reads schemas itself."""
    return RandomWriter(tmp_path_factory.mktemp("either"), request.param)


def test_no_document_that_a_schema_rules_out_fits_its_grammar(either: RandomWriter) -> None:
    compiled = 0
    for case in cases():
        try:
            grammar = either.compiler.compile(case.grammar())
        except GrammarRefused:
            continue
        compiled += 1
        for document, valid in case.documents:
            automaton = grammar.automaton((either.eos,))
            text = json.dumps(document, ensure_ascii=False).encode()
            fits = automaton.accept_bytes(text) and automaton.accept_token(either.eos)
            assert valid or not fits, (case.name, case.schema, document)
    assert compiled > 380


def test_every_document_written_under_a_grammar_satisfies_the_schema(either: RandomWriter) -> None:
    random = Random(7)
    written = cut = 0
    for case in cases():
        try:
            either.compiler.compile(case.grammar())
        except GrammarRefused:
            continue
        for number in range(DOCUMENTS):
            _, text = either.write(case.grammar(compact=number > 0), random)
            if text is None:
                cut += 1
                continue
            written += 1
            assert case.valid(json.loads(text.decode())), (case.name, case.schema, text)
    assert written > 1000
    assert cut < written / 10


def test_every_schema_that_people_write_compiles(writer: RandomWriter) -> None:
    for case in practical():
        writer.compiler.compile(case.grammar())


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": INTEGER}, "patternProperties": {"^x": STRING}, "additionalProperties": False},
        {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 4},
        {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9},
    ],
)
def test_what_one_back_end_refuses_the_other_may_take(
    writer: RandomWriter, tmp_path_factory: pytest.TempPathFactory, schema: Any
) -> None:
    grammar = Grammar("json", json.dumps(schema))
    with pytest.raises(GrammarRefused):
        writer.compiler.compile(grammar)
    auto, random = RandomWriter(tmp_path_factory.mktemp("auto"), "auto"), Random(3)
    texts = [text for _ in range(8) if (text := auto.write(grammar, random)[1]) is not None]
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


REFUSED: list[tuple[Any, str]] = [
    (5, "$: 5 is not a schema"),
    (False, "$: no value satisfies this schema"),
    ({"type": "foo"}, "$.type: 'foo' is not a type"),
    ({"type": []}, "$.type: [] is not allowed"),
    ({"not": {}}, "$.not: this keyword is not supported"),
    ({"properties": {"a": {"not": STRING}}}, "$.properties.a.not: this keyword is not supported"),
    ({"if": {}, "then": {}}, "$.if: this keyword is not supported"),
    ({"items": {"items": {"contains": {}}}}, "$.items.items.contains: this keyword is not supported"),
    ({"dependentRequired": {"a": ["b"]}}, "$.dependentRequired: this keyword is not supported"),
    ({"$dynamicRef": "#a"}, "$.$dynamicRef: this keyword is not supported"),
    ({"items": INTEGER, "uniqueItems": True}, "$.uniqueItems: not supported"),
    ({"items": {"$ref": "#/$defs/x"}}, "$.items.$ref: '#/$defs/x' leads nowhere"),
    ({"$ref": "http://a/b"}, "$.$ref: 'http://a/b' is not supported"),
    ({"$ref": 5}, "$.$ref: 5 is not allowed"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "refers to nothing but itself"),
    ({"allOf": [{"$ref": "#"}]}, "refers to nothing but itself"),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "$.oneOf: its branches must exclude each other"),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "$.oneOf: its branches must exclude each other"),
    ({"anyOf": []}, "$.anyOf: [] is not allowed"),
    ({"pattern": "a", "maxLength": 3}, "$.pattern: not supported together with minLength or maxLength"),
    ({"pattern": "a$b"}, "$.pattern: $ is supported at the end only"),
    ({"pattern": "a^b"}, "$.pattern: ^ is supported at the beginning only"),
    ({"pattern": "a(?=c)b"}, "$.pattern: look-aheads are not supported"),
    ({"patternProperties": {"^(?!b)b$": {}}}, "$.patternProperties: look-aheads are not supported"),
    ({"pattern": 5}, "$.pattern: 5 is not allowed"),
    ({"pattern": "("}, ""),  # in xgrammar's words
    ({"type": "number", "multipleOf": 0.01}, "$.multipleOf: 0.01 is not supported"),
    ({"multipleOf": 3, "minimum": 1}, "$.multipleOf: not supported together with bounds"),
    ({"minimum": "1"}, "$.minimum: '1' is not allowed"),
    ({"minLength": -1}, "$.minLength: -1 is not allowed"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "$: no value satisfies this schema"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "$: no value satisfies this schema"),
    ({"enum": []}, "$: no value satisfies this schema"),
    ({"enum": "ab"}, "$.enum: 'ab' is not allowed"),
    ({"enum": ["a"], "pattern": "a"}, "$.pattern: not supported together with enum or const"),
    ({"type": "integer", "const": "a"}, "$: no value satisfies this schema"),
    ({"properties": 5}, "$.properties: 5 is not allowed"),
    ({"required": "a"}, "$.required: 'a' is not allowed"),
    ({"required": ["a"], "additionalProperties": False}, "$: no value satisfies this schema"),
    ({"additionalProperties": INTEGER, "minProperties": 2}, "$.minProperties: above 1"),
    ({"properties": {"a": {}}, "patternProperties": {"a": {}}}, "$.patternProperties: not supported together"),
    ({"propertyNames": {"enum": ["a"]}}, "$.propertyNames.enum: not supported"),
    ({"allOf": [STRING, INTEGER]}, "$: no value satisfies this schema"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "$.pattern: given twice"),
    ({"items": {"$id": "x", "type": "string"}}, "$.items.$id: a schema within a schema is not supported"),
    ({"unevaluatedProperties": False, "allOf": [{}]}, "$.unevaluatedProperties: only false is supported, and not"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_enforced_is_refused_with_its_place(writer: RandomWriter, schema: Any, reason: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        writer.compiler.compile(Grammar("json", json.dumps(schema)))
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    "pattern", [r"^c(ab+)?c$", r"^ls( -[al]{1,2})? /(tmp|etc)$", r"^(?:a(b*)?)?c$", r"^\)?[)?]\(?$"]
)
def test_what_follows_a_pattern_matches_it(either: RandomWriter, pattern: str) -> None:
    """xgrammar 0.2.8 takes an optional group that ends in a repetition to begin anywhere in it."""
    grammar = Grammar("json", json.dumps({"type": "string", "pattern": pattern}))
    written = [either.write(grammar, Random(seed))[1] for seed in range(25)]
    found = {json.loads(text) for text in written if text is not None}
    assert len(found) > 1
    assert [text for text in found if not re.search(pattern, text)] == []


def test_schemas_that_double_at_every_level_are_refused_and_not_expanded() -> None:
    definitions: dict[str, Any] = {"a0": {"minimum": 1}}
    for level in range(1, 40):
        below = {"$ref": f"#/$defs/a{level - 1}"}
        definitions[f"a{level}"] = {"allOf": [below, below]}
    with pytest.raises(GrammarRefused, match="more than 20000 schemas"):
        normal_form({"$ref": "#/$defs/a39", "$defs": definitions})


def test_the_order_of_properties_is_the_schemas() -> None:
    form = normal_form({"properties": {"b": INTEGER, "a": STRING}, "required": ["z", "a"]})
    assert list(form["properties"]) == ["b", "a", "z"]


def test_schemas_of_any_shape_are_read_or_refused() -> None:
    """Malformed ones too: a client's mistake must never be a bug of ours."""
    random = Random(3)
    keywords = sorted({word for case in cases() if isinstance(case.schema, dict) for word in case.schema})
    values: list[Any] = [*cases()[::9]]
    values = [value.schema for value in values] + [None, 1, -1.5, "x", [], {}, True, False, ["a"], [{}], {"a": 1}]
    for _ in range(4000):
        schema = {random.choice(keywords): random.choice(values) for _ in range(random.randint(1, 4))}
        with contextlib.suppress(GrammarRefused):
            assert json.loads(json.dumps(normal_form(schema))) is not None
