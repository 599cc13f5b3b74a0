"""The OpenAPI page describes what the gateway takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema
import msgspec
import pytest

from services.gateway.api.anthropic.answer import error_body as anthropic_error
from services.gateway.api.errors import RequestError
from services.gateway.api.ollama.answer import error_body as ollama_error
from services.gateway.api.openapi import OPERATIONS, openapi_page

PAGE = msgspec.json.decode(openapi_page("1.2.3"))
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def schema_of(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}", "components": PAGE["components"]}


def test_every_schema_is_valid_and_every_reference_leads_somewhere() -> None:
    assert (PAGE["openapi"], PAGE["info"]["version"]) == ("3.1.0", "1.2.3")
    for operation in OPERATIONS:
        described = PAGE["paths"][operation.path][operation.method.lower()]
        assert ("requestBody" in described) == (operation.body is not None)
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert [each["name"] for each in PAGE["paths"][path]["post"]["parameters"]] == ["Last-Event-ID"]
    for name in PAGE["components"]["schemas"]:
        validator = jsonschema.Draft202012Validator(schema_of(name))
        validator.check_schema(schema_of(name))
        list(validator.iter_errors({}))


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("ChatFields", CHAT | {"temperature": 0.5, "stream_options": {"include_usage": True}, "stop": ["a"]}),
        ("ChatFields", CHAT | {"n": None, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
        ("CompletionFields", {"prompt": [1, 2], "echo": True, "max_tokens": 0}),
        ("TokenizeFields", {"prompt": "hi"}),
        ("DetokenizeFields", {"tokens": [1]}),
    ],
)
def test_what_is_taken_is_valid(name: str, body: dict[str, Any]) -> None:
    jsonschema.validate(body, schema_of(name))


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("ChatFields", {}),
        ("ChatFields", CHAT | {"top_p": 0}),
        ("ChatFields", CHAT | {"n": 129}),
        ("CompletionFields", {"prompt": 5}),
        ("DetokenizeFields", {"tokens": ["a"]}),
    ],
)
def test_what_is_refused_is_not(name: str, body: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body, schema_of(name))


@pytest.mark.parametrize(
    ("path", "body_of"),
    [
        ("/v1/completions", RequestError.body),
        ("/v1/messages", anthropic_error),
        ("/v1/messages/count_tokens", anthropic_error),
        ("/api/chat", ollama_error),
        ("/api/show", ollama_error),
    ],
)
def test_errors_have_the_shape_that_is_described(path: str, body_of: Callable[[RequestError], bytes]) -> None:
    described = PAGE["paths"][path]["post"]["responses"]["default"]["content"]["application/json"]["schema"]
    told = msgspec.json.decode(body_of(RequestError(400, "model: 'x' is not served", param="model")))
    jsonschema.Draft202012Validator({**described, "components": PAGE["components"]}).validate(told)
