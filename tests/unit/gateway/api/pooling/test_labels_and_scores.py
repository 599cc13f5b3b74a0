"""What clients may send to `/pooling`, `/classify`, `/score` and `/rerank`, and the shapes of the answers."""

from __future__ import annotations

import base64
import math
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from services.gateway.api.errors import RequestError
from services.gateway.api.generation import RequestLimits
from services.gateway.api.pooling.activation import activated
from services.gateway.api.pooling.classification import read_classification
from services.gateway.api.pooling.embeddings import read_embedding, read_pooling_request
from services.gateway.api.pooling.pooled_request import PooledRequest
from services.gateway.api.pooling.scores import read_rerank, read_score
from services.gateway.api.response import ChoiceState, ResponseHeader
from shared.messages.generation import PoolingOptions
from shared.messages.model_card import ModelCard, PoolingCard
from shared.messages.tokenizer import PairPrompt, TextPrompt
from tests.support.gateway.model_cards import vectors_card

EMBEDDINGS = vectors_card(2, normalize=False)
THREE = replace(
    EMBEDDINGS,
    pooling=PoolingCard(pooling="last", normalize=False, size=3, labels=("bad", "fair", "good"), activation="softmax"),
)
ONE = replace(
    EMBEDDINGS,
    pooling=PoolingCard(pooling="last", normalize=False, size=1, labels=("LABEL_0",), activation="sigmoid"),
)
STEPS = replace(
    EMBEDDINGS,
    pooling=PoolingCard(
        pooling="all",
        normalize=False,
        size=3,
        labels=("LABEL_0", "LABEL_1", "LABEL_2"),
        activation="softmax",
        step_tag_id=9,
        token_ids=(20, 30, 40),
    ),
)
NEITHER = replace(EMBEDDINGS, pooling=None)
Reader = Callable[[bytes, list[ModelCard], RequestLimits], PooledRequest]


def read(reader: Reader, card: ModelCard, **fields: Any) -> PooledRequest:
    return reader(msgspec.json.encode(fields), [card], RequestLimits(max_embeddings=3))


def answer(asked: PooledRequest, *vectors: Sequence[float]) -> Any:
    """The JSON of the response, written by a request that has been in another process."""
    asked = pickle.loads(pickle.dumps(asked))
    choices = [
        ChoiceState(i, i, prompt_tokens=2, vector=struct.pack(f"<{len(vector)}f", *vector))
        for i, vector in enumerate(vectors)
    ]
    assert len(choices) == len(asked.generation.prompts)
    header = ResponseHeader(asked.generation.kind, "x-1", 7, "demo", asked.prompt_field)
    return msgspec.json.decode(asked.body(header, choices, [asked.element(i, choices) for i in range(asked.elements)]))


def test_tokens_have_vectors_of_their_own() -> None:
    asked = read(read_pooling_request, EMBEDDINGS, input=["a", "b"], task="token_embed", dimensions=2)
    assert asked.generation.pooling == PoolingOptions(pooling="all", dimensions=2, normalize=False)
    body = answer(asked, (1.0, 2.0, 3.0, 4.0), (5.0, 6.0))
    assert [each["data"] for each in body["data"]] == [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]]]
    asked = read(read_pooling_request, THREE, input="a", task="token_classify", encoding_format="base64")
    (found,) = answer(asked, (0.0, 0.0, 0.0, 9.0, 9.0, 9.0))["data"]
    assert struct.unpack("<6f", base64.b64decode(found["data"])) == pytest.approx([1 / 3] * 6)


def test_labels_have_probabilities() -> None:
    asked = read(read_classification, THREE, input=["a", "b"])
    assert asked.generation.pooling == PoolingOptions(pooling="last", dimensions=3, normalize=False)
    body = answer(asked, (0.0, 1.0, 0.0), (3.0, 1.0, 2.0))
    total = 2 + math.e
    assert body["data"][0]["probs"] == pytest.approx([1 / total, math.e / total, 1 / total])
    assert [(each["index"], each["label"], each["num_classes"]) for each in body["data"]] == [
        (0, "fair", 3),
        (1, "bad", 3),
    ]
    usage = {
        "prompt_tokens": 4,
        "total_tokens": 4,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    assert (body["object"], body["usage"]) == ("list", usage)
    plain = answer(read(read_classification, THREE, input="a", use_activation=False), (3.0, 1.0, 2.0))
    assert plain["data"][0]["probs"] == [3.0, 1.0, 2.0]


def test_logits_stay_as_they_are_where_settings_say_so_and_a_request_does_not() -> None:
    assert ONE.pooling is not None
    card = replace(ONE, pooling=replace(ONE.pooling, activated=False))
    raw, probabilities = (
        answer(read(read_classification, card, input="a", **more), (3.0,))["data"][0]["probs"]
        for more in ({}, {"use_activation": True})
    )
    assert raw == [3.0] != probabilities == [pytest.approx(1 / (1 + math.exp(-3.0)))]


def test_activations_are_pytorchs_at_any_size() -> None:
    assert activated((0.0, 1000.0, -1000.0), "sigmoid") == (0.5, 1.0, 0.0)
    assert activated((1000.0, 1000.0), "softmax") == (0.5, 0.5)
    assert activated((5.0,), "none") == (5.0,)


def test_pooling_gives_what_the_model_makes() -> None:
    body = answer(read(read_pooling_request, EMBEDDINGS, input="a", task="embed", normalize=True), (0.5, 1.0))
    assert body["data"] == [{"object": "pooling", "index": 0, "data": [0.5, 1.0]}]
    body = answer(read(read_pooling_request, ONE, input="a", encoding_format="base64"), (0.0,))
    assert base64.b64decode(body["data"][0]["data"]) == struct.pack("<f", 0.5)
    assert read(read_pooling_request, EMBEDDINGS, input="a", dimensions=1).generation.pooling == PoolingOptions(
        pooling="mean", dimensions=1, normalize=False
    )


def test_nothing_of_an_encoders_prompts_is_cached() -> None:
    assert EMBEDDINGS.pooling is not None
    encoder = replace(EMBEDDINGS, pooling=replace(EMBEDDINGS.pooling, whole=True))
    generation = read(read_pooling_request, encoder, input="a").generation
    assert generation.pooling == PoolingOptions(pooling="mean", dimensions=2, normalize=False, whole=True)
    assert not generation.prefix_caching


def test_a_cross_encoder_reads_both_texts_as_one() -> None:
    asked = read(read_score, ONE, text_1="q", text_2=["a", "b"])
    assert asked.generation.prompts == (PairPrompt("q", "a"), PairPrompt("q", "b"))
    body = answer(asked, (0.0,), (1.0,))
    assert body["data"] == [
        {"index": 0, "object": "score", "score": 0.5},
        {"index": 1, "object": "score", "score": pytest.approx(1 / (1 + math.exp(-1)))},
    ]
    raw = answer(read(read_score, ONE, queries=["q", "r"], documents=["a", "b"], use_activation=False), (3.0,), (-2.0,))
    assert [each["score"] for each in raw["data"]] == [3.0, -2.0]


def test_scores_of_embeddings_are_cosines() -> None:
    asked = read(read_score, EMBEDDINGS, text_1="q", text_2=["a", "b"])
    assert asked.generation.prompts == (TextPrompt("q"), TextPrompt("a"), TextPrompt("b"))
    assert asked.generation.pooling == PoolingOptions(pooling="mean", dimensions=2, normalize=True)
    body = answer(asked, (0.6, 0.8), (1.0, 0.0), (0.0, -1.0))
    assert [each["score"] for each in body["data"]] == pytest.approx([0.6, -0.8])
    pairs = answer(
        read(read_score, EMBEDDINGS, text_1=["q", "r"], text_2=["a", "b"]),
        *((0.6, 0.8), (0.0, 1.0), (1.0, 0.0), (0.0, -1.0)),
    )
    assert [each["score"] for each in pairs["data"]] == pytest.approx([0.6, -1.0])


def test_the_most_relevant_documents_come_first() -> None:
    documents = ["a", {"text": "b"}, "c"]
    body = answer(read(read_rerank, ONE, query="q", documents=documents, top_n=2), (0.0,), (2.0,), (1.0,))
    assert [(each["index"], each["document"]) for each in body["results"]] == [(1, {"text": "b"}), (2, {"text": "c"})]
    assert body["results"][0]["relevance_score"] > body["results"][1]["relevance_score"] > 0.5
    assert (body["usage"]["prompt_tokens"], body["usage"]["total_tokens"]) == (6, 6)
    body = answer(
        read(read_rerank, ONE, query="q", documents=documents, return_documents=False), (0.0,), (2.0,), (0.0,)
    )
    assert [each["index"] for each in body["results"]] == [1, 0, 2]
    assert "document" not in body["results"][0]


def test_coheres_second_version_has_meta_and_no_documents() -> None:
    body = msgspec.json.encode({"query": "q", "documents": ["a", "b"], "top_n": 5})
    asked = read_rerank(body, [ONE], RequestLimits(), cohere=True)
    got = answer(asked, (0.0,), (2.0,))
    assert [sorted(each) for each in got["results"]] == [["index", "relevance_score"]] * 2
    assert got["meta"]["tokens"] == {"input_tokens": 4}


@pytest.mark.parametrize(
    ("reader", "card", "fields", "param", "text"),
    [
        (read_classification, EMBEDDINGS, {"input": "a"}, "model", "has no labels; it serves /v1/embeddings, /pooling"),
        (read_embedding, THREE, {"input": "a"}, "model", "is a classifier; it serves /classify and /pooling"),
        (read_score, NEITHER, {"text_1": "a", "text_2": "b"}, "model", "--pooling-type"),
        (read_score, THREE, {"text_1": "a", "text_2": "b"}, "model", "3 labels, and a score needs one; it serves"),
        (read_pooling_request, THREE, {"input": "a", "task": "embed"}, "task", "this model serves 'classify'"),
        (
            read_pooling_request,
            EMBEDDINGS,
            {"input": "a", "task": "token_classify"},
            "task",
            "'embed' and 'token_embed'",
        ),
        (read_pooling_request, THREE, {"input": "a", "dimensions": 2}, "dimensions", "not supported"),
        (read_score, ONE, {"text_2": "b"}, "text_1", "this field is required"),
        (read_score, ONE, {"text_1": "a", "text_2": []}, "text_2", "at least one text is needed"),
        (read_score, ONE, {"queries": "a"}, "documents", "this field is required"),
        (read_score, ONE, {"queries": "a", "documents": "b", "text_1": "c"}, "text_1", "together with queries"),
        (read_score, ONE, {"text_1": ["a"] * 2, "text_2": ["b"] * 3}, "text_1", "2 texts beside 3 in text_2"),
        (read_score, ONE, {"text_1": "a", "text_2": ["b"] * 4}, "text_2", "4 texts are not allowed; at most 3 are"),
        (read_score, ONE, {"items": "a", "text_1": "c", "queries": "b"}, "text_1", "together with queries and items"),
        (read_score, ONE, {"data_1": "a"}, "data_2", "this field is required"),
        (read_score, ONE, {"text_1": "a", "text_2": "b", "max_tokens_per_doc": -1}, "max_tokens_per_doc", "0 for all"),
        (read_score, EMBEDDINGS, {"text_1": "a", "text_2": "b", "use_activation": True}, "use_activation", "cosine"),
        (read_score, EMBEDDINGS, {"text_1": "a", "text_2": "b", "softmax": False}, "softmax", "cosine"),
        (
            read_classification,
            THREE,
            {"input": "a", "use_activation": True, "softmax": False},
            "softmax",
            "say the same",
        ),
        (read_rerank, ONE, {"documents": ["a"]}, "query", "this field is required"),
        (read_rerank, ONE, {"query": "a", "documents": []}, "documents", "at least one text is needed"),
        (read_rerank, ONE, {"query": "a", "documents": [{"title": "b"}]}, "documents[0].text", "required"),
        (read_rerank, ONE, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "-1 is not allowed"),
        (read_rerank, ONE, {"query": "a", "documents": ["b"], "rank_fields": ["c"]}, "rank_fields", "parts"),
    ],
)
def test_what_a_refusal_names(reader: Reader, card: ModelCard, fields: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(RequestError) as error:
        read(reader, card, **fields)
    assert (error.value.status, error.value.param) == (400, param)
    assert text in error.value.message


def test_texts_of_a_pair_may_be_cut_each_and_together() -> None:
    bounds = {"max_tokens_per_query": 3, "max_tokens_per_doc": 0, "truncate_prompt_tokens": 9}
    asked = read(read_rerank, ONE, query="a", documents="b", **bounds)
    assert asked.generation.prompts == (PairPrompt("a", "b", 3, None),)
    assert asked.generation.truncate_prompt_tokens == 9
    for names in (("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"), ("queries", "documents")):
        (prompt,) = read(
            read_score, ONE, **dict(zip(names, "ab", strict=True)), max_tokens_per_doc=4
        ).generation.prompts
        assert prompt == PairPrompt("a", "b", None, 4)


def test_texts_that_become_embeddings_have_the_bound_of_their_side() -> None:
    asked = read(read_rerank, EMBEDDINGS, query="a", documents=["b", "c"], max_tokens_per_query=3, max_tokens_per_doc=5)
    assert asked.generation.prompts == tuple(
        TextPrompt(text, text_tokens=bound) for text, bound in (("a", 3), ("b", 5), ("c", 5))
    )
    with pytest.raises(RequestError, match="max_tokens_per_doc: -1 is not allowed"):
        read(read_rerank, EMBEDDINGS, query="a", documents="b", max_tokens_per_doc=-1)


def test_steps_have_the_probabilities_of_the_tokens_that_are_asked_for() -> None:
    options = PoolingOptions(pooling="all", dimensions=3, normalize=False, step_tag_id=9)
    asked = read(read_pooling_request, STEPS, input=["a", "b"])
    assert asked.generation.pooling == options
    data = answer(asked, [0.0, 0.0, 0.0, 0.0, math.log(2), 0.0], [])["data"]
    assert data[0]["data"] == [pytest.approx([1 / 3] * 3), pytest.approx([0.25, 0.5, 0.25])]
    assert data[1]["data"] == []  # no step ends in this one

    fields: dict[str, Any] = {"input": "a", "step_tag_id": 4, "returned_token_ids": [40, 20], "task": "token_classify"}
    asked = read(read_pooling_request, STEPS, **fields)
    assert asked.generation.pooling == replace(options, step_tag_id=4)
    assert answer(asked, [math.log(3), 50.0, 0.0])["data"][0]["data"] == [pytest.approx([0.25, 0.75])]
    bare = read(read_pooling_request, STEPS, **fields, use_activation=False, encoding_format="base64")
    packed = base64.b64decode(answer(bare, [1.0, 2.0, 3.0])["data"][0]["data"])
    assert struct.unpack("<2f", packed) == (3.0, 1.0)

    assert STEPS.pooling is not None
    own_head = replace(STEPS, pooling=replace(STEPS.pooling, token_ids=()))  # asked for labels by their numbers
    assert answer(read(read_pooling_request, own_head, input="a", returned_token_ids=[1]), [0.0, 1.0, 2.0])["data"][0][
        "data"
    ] == [[1.0]]


@pytest.mark.parametrize(
    ("reader", "card", "fields", "param", "text"),
    [
        (read_pooling_request, "EMBEDDINGS", {"input": "a", "step_tag_id": 3}, "step_tag_id", "--pooling-type step"),
        (read_pooling_request, "THREE", {"input": "a", "returned_token_ids": [1]}, "returned_token_ids", "--pooling"),
        (read_pooling_request, "STEPS", {"input": "a", "returned_token_ids": [20, 21]}, "returned_token_ids", "20, 30"),
        (read_pooling_request, "STEPS", {"input": "a", "returned_token_ids": []}, "returned_token_ids", "[] is not"),
        (read_pooling_request, "STEPS", {"input": "a", "step_tag_id": 100}, "step_tag_id", "the tokens 0 to 99"),
        (read_pooling_request, "STEPS", {"input": "a", "task": "classify"}, "task", "'token_classify'"),
        (
            read_classification,
            "STEPS",
            {"input": "a"},
            "model",
            "the steps of solutions; it serves /pooling",
        ),
        (read_score, "STEPS", {"text_1": "a", "text_2": "b"}, "model", "judges tokens, or the steps"),
        (read_embedding, "STEPS", {"input": "a"}, "model", "judges tokens, or the steps"),
    ],
)
def test_what_a_refusal_of_steps_names(
    reader: Reader, card: str, fields: dict[str, Any], param: str, text: str
) -> None:
    with pytest.raises(RequestError) as error:
        read(reader, globals()[card], **fields)
    assert (error.value.status, error.value.param) == (400, param)
    assert text in error.value.message
