"""What clients may send to `/v2/embed`, and the shape of the answer: what vLLM 0.32 answered, with other numbers."""

from __future__ import annotations

import base64
import struct
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from services.gateway.api.errors import RequestError
from services.gateway.api.generation import RequestLimits
from services.gateway.api.pooling.cohere import CohereEmbedRequest, read_cohere_embed
from services.gateway.api.response import ChoiceState, ResponseHeader
from shared.messages.model_card import ModelCard
from shared.messages.tokenizer import TextPrompt
from tests.support.gateway.model_cards import vectors_card

CARD = vectors_card(16)
assert CARD.pooling is not None
PROMPTED = replace(CARD, pooling=replace(CARD.pooling, prompts=(("query", "find: "), ("clustering", "sort: "))))


def read(card: ModelCard = CARD, **fields: Any) -> CohereEmbedRequest:
    body = msgspec.json.encode({"texts": ["a", "b"], **fields})
    return read_cohere_embed(body, [card], RequestLimits(max_embeddings=2))


def test_the_answer_has_coheres_shape() -> None:
    asked = read(embedding_types=["float", "base64", "binary", "ubinary"])
    vectors = [[1.0, -1.0] * 8, [-0.5] * 8 + [0.0] * 8]
    packed = [struct.pack("<16f", *vector) for vector in vectors]
    choices = [ChoiceState(i, i, prompt_tokens=3, vector=each) for i, each in enumerate(packed)]
    header = ResponseHeader(asked.generation.kind, "embd-1", 7, "demo", asked.prompt_field)
    elements = [asked.element(i, choices) for i in range(asked.elements)]
    assert msgspec.json.decode(asked.body(header, choices, elements)) == {
        "id": "embd-1",
        "texts": ["a", "b"],
        "embeddings": {
            "float": vectors,
            "base64": [base64.b64encode(each).decode() for each in packed],
            "binary": [[42, 42], [-128, 127]],
            "ubinary": [[170, 170], [0, 255]],
        },
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 6, "image_tokens": 0}},
        "response_type": "embeddings_by_type",
    }


def test_a_text_that_is_too_long_loses_its_end_unless_the_request_says_otherwise() -> None:
    def kept(**fields: Any) -> tuple[int | None, str]:
        generation = read(**fields).generation
        return generation.truncate_prompt_tokens, generation.truncation_side

    assert kept() == (64, "right")
    assert kept(max_tokens=5) == kept(max_tokens=5, truncate="END") == (5, "right")
    assert kept(truncate="START") == (64, "left")
    assert kept(truncate="NONE")[0] is None


def test_a_type_of_input_is_the_models_own_prompt() -> None:
    def prompts(card: ModelCard, kind: str | None) -> tuple[Any, ...]:
        return read(card, input_type=kind).generation.prompts

    plain = (TextPrompt("a"), TextPrompt("b"))
    assert prompts(CARD, "search_query") == prompts(CARD, None) == prompts(PROMPTED, None) == plain
    assert prompts(PROMPTED, "search_query") == prompts(PROMPTED, "query")
    assert prompts(PROMPTED, "query") == (TextPrompt("find: a"), TextPrompt("find: b"))
    assert prompts(PROMPTED, "clustering") == (TextPrompt("sort: a"), TextPrompt("sort: b"))
    assert read(PROMPTED, input_type="query").texts == ("a", "b")


@pytest.mark.parametrize(
    ("card", "fields", "param", "text"),
    [
        (CARD, {"texts": []}, "texts", "at least one text"),
        (CARD, {"texts": ["a"] * 3}, "texts", "at most 2 are"),
        (CARD, {"texts": None, "images": ["x"]}, "images", "anything but texts"),
        (CARD, {"inputs": []}, "inputs", "anything but texts"),
        (CARD, {"input_type": "image"}, "input_type", "search_query, search_document"),
        (PROMPTED, {"input_type": "search_document"}, "input_type", "it must be one of query, clustering"),
        (CARD, {"truncate": "NONE", "max_tokens": 5}, "max_tokens", "not allowed together with truncate NONE"),
        (CARD, {"embedding_types": ["int8"]}, "embedding_types[0]", "'int8' is not allowed"),
        (CARD, {"embedding_types": ["binary"], "output_dimension": 9}, "embedding_types", "vectors have 9"),
        (CARD, {"output_dimension": 17}, "dimensions", "it must be 1 to 16"),
    ],
)
def test_a_refusal_names_the_field(card: ModelCard, fields: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(RequestError) as error:
        read(card, **fields)
    assert (error.value.status, error.value.param) == (400, param)
    assert text in error.value.message
