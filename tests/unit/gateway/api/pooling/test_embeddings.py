"""What clients may send to `/v1/embeddings`, and the shape of the answer."""

from __future__ import annotations

import base64
import struct
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from services.gateway.api.chat import read_chat
from services.gateway.api.completions import read_completion
from services.gateway.api.errors import RequestError
from services.gateway.api.generation import RequestLimits
from services.gateway.api.pooling.embeddings import EmbeddingRequest, read_embedding
from services.gateway.api.response import ChoiceState, ResponseHeader
from shared.messages.generation import PoolingOptions
from shared.messages.model_card import ModelCard, PoolingCard
from shared.messages.tokenizer import ChatPrompt, TextPrompt, TokenPrompt
from shared.packing import pack
from tests.support.gateway.model_cards import vectors_card

CARD = vectors_card(8)


def read(card: ModelCard = CARD, **fields: Any) -> EmbeddingRequest:
    return read_embedding(msgspec.json.encode({"input": "hi"} | fields), [card], RequestLimits(max_embeddings=3))


def refusal(card: ModelCard = CARD, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        read(card, **fields)
    return error.value


def test_nothing_is_generated_and_vectors_are_whole_by_default() -> None:
    generation, encoding, *_ = read()
    assert (generation.kind, generation.prompts, generation.stream) == ("embedding", (TextPrompt("hi"),), None)
    assert generation.pooling == PoolingOptions(pooling="mean", dimensions=8, normalize=True)
    assert generation.stopping.expected_tokens == 0
    assert encoding == "float"


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", (TextPrompt("a"),)),
        (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
        ([5, 6], (TokenPrompt(pack([5, 6])),)),
        ([[5], [6, 7]], (TokenPrompt(pack([5])), TokenPrompt(pack([6, 7])))),
    ],
)
def test_inputs_are_texts_or_token_ids(given: Any, prompts: Any) -> None:
    assert read(input=given).generation.prompts == prompts


def test_fields_have_their_effects() -> None:
    generation, encoding, *_ = read(
        dimensions=3,
        normalize=False,
        encoding_format="base64",
        add_special_tokens=False,
        truncate_prompt_tokens=-1,
        priority=2,
        cache_salt="s",
        enable_prefix_caching=False,
        user="me",
    )
    assert generation.pooling == PoolingOptions(pooling="mean", dimensions=3, normalize=False)
    assert generation.prompts == (TextPrompt("hi", False),)
    assert (generation.truncate_prompt_tokens, generation.priority, generation.cache_salt) == (64, 2, "s")
    assert (generation.prefix_caching, encoding) == (False, "base64")


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"input": None}, "input", "input: this field is required"),
        ({"input": []}, "input", "[] is not allowed"),
        ({"input": ["a", 5]}, "input", "['a', 5] is not allowed; a string, token ids, or a list of either"),
        ({"input": [[]]}, "input[0]", "at least one token is needed"),
        ({"input": [[5], [100]]}, "input[1]", "token ids are 0 to 99"),
        ({"input": ["a"] * 4}, "input", "4 inputs are not allowed; at most 3 are"),
        ({"dimensions": 0}, "dimensions", "0 is not allowed; it must be 1 to 8"),
        ({"dimensions": 9}, "dimensions", "9 is not allowed; it must be 1 to 8"),
        ({"encoding_format": "hex"}, "encoding_format", "'hex' is not allowed"),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "it must be 1 to 64"),
        ({"priority": 2**40}, "priority", "it must be at least"),
        ({"cache_salt": ""}, "cache_salt", "1 to 256 characters"),
        ({"input": None, "messages": []}, "messages", "at least one message is needed"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "not allowed together with input"),
        ({"input": [{"role": "user", "content": "a"}, "b"]}, "input", "a list of messages, or a list of such lists"),
        ({"model": "other"}, "model", "does not exist"),
    ],
)
def test_a_refusal_names_the_field_and_what_is_allowed(fields: dict[str, Any], param: str, text: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert text in error.message


def test_a_vector_is_made_of_a_chat_by_either_of_vllms_fields() -> None:
    first, second = [{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]
    chats = [ChatPrompt(messages=msgspec.json.encode(chat), add_generation_prompt=False) for chat in (first, second)]
    one, both = (tuple(chats[:1]), tuple(chats))
    assert read(CARD, messages=first, input=None).generation.prompts == one
    assert read(CARD, messages=[first, second], input=[]).generation.prompts == both  # OpenAI's SDK needs an input
    assert read(CARD, input=first).generation.prompts == one
    assert read(CARD, input=[first, second]).generation.prompts == both
    (asked,) = read(CARD, messages=first, input=None, add_generation_prompt=True).generation.prompts
    assert asked == replace(chats[0], add_generation_prompt=True)


def test_a_model_may_allow_some_numbers_of_dimensions_only() -> None:
    nested = replace(CARD, pooling=PoolingCard(pooling="last", normalize=True, size=8, matryoshka=(2, 4)))
    assert read(nested, dimensions=4).generation.pooling == PoolingOptions(pooling="last", dimensions=4)
    assert "3 is not allowed; this model's embeddings may be cut to 2, 4" in refusal(nested, dimensions=3).message


def test_a_model_without_pooling_is_refused_in_words() -> None:
    error = refusal(replace(CARD, pooling=None))
    assert (error.status, error.param) == (400, "model")
    assert "--pooling-type" in error.message


def test_a_model_without_a_head_generates_nothing() -> None:
    headless = replace(CARD, generates=False)
    for reader, field in (
        (read_chat, {"messages": [{"role": "user", "content": "x"}]}),
        (read_completion, {"prompt": "x"}),
    ):
        with pytest.raises(RequestError, match="no language model head") as error:
            reader(msgspec.json.encode(field), [headless], RequestLimits())  # type: ignore[operator]
        assert error.value.param == "model"


def test_the_answer_has_openais_shape() -> None:
    vectors = [(0.5, -1.0), (0.1, 2.0)]
    choices = [ChoiceState(i, i, prompt_tokens=3 + i, vector=struct.pack("<2f", *v)) for i, v in enumerate(vectors)]
    header = ResponseHeader("embedding", "embd-1", 7, "demo")
    asked = read(input=["a", "b"])
    assert asked.elements == 2
    body = msgspec.json.decode(asked.body(header, choices, [asked.element(i, choices) for i in range(2)]))
    assert body.pop("data") == [
        {"object": "embedding", "index": 0, "embedding": [0.5, -1.0]},
        {"object": "embedding", "index": 1, "embedding": [pytest.approx(0.1), 2.0]},
    ]
    usage = {
        "prompt_tokens": 7,
        "total_tokens": 7,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    assert body == {"object": "list", "id": "embd-1", "created": 7, "model": "demo", "usage": usage}
    packed = msgspec.json.decode(read(encoding_format="base64").element(1, choices))["embedding"]
    assert base64.b64decode(packed) == choices[1].vector
