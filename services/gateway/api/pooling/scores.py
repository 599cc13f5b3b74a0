"""`POST /score` and `POST /rerank`: how well texts go together.

A classifier with one label (a cross-encoder) reads both texts as one prompt, and its label's logit is the score. Of a
model that makes embeddings, the score is the cosine of the two texts' vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import mul
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from services.gateway.api.errors import RequestError, decode_body, invalid, not_allowed, unsupported
from services.gateway.api.generation import GenerationKind, GenerationRequest, RequestLimits, choose_model
from services.gateway.api.pooling.activation import activated, vector_of
from services.gateway.api.pooling.pooled_request import (
    ACTIVATION_NAMES,
    PooledFields,
    chosen_activation,
    embedding_options,
    list_body,
    logit_options,
    pooled_generation,
    pooled_usage,
    pooling_of,
    wants_activation,
)
from services.gateway.api.response import ChoiceState, ResponseHeader
from shared.messages.model_card import LogitActivation, ModelCard
from shared.messages.tokenizer import PairPrompt, Prompt, TextPrompt


class ScoreOptionFields(PooledFields, kw_only=True):
    """The JSON fields that both endpoints have beside the texts."""

    max_tokens_per_query: int | None = None
    """Tokens of a query that are read, from its beginning; 0: all."""
    max_tokens_per_doc: int | None = None
    """The same of a document."""
    # Not supported. Refused rather than ignored, as the answer would differ from what the client expects.
    max_chunks_per_doc: Any = None
    rank_fields: Any = None
    instruction: Any = None
    chat_template_kwargs: Any = None
    relevant_spans: Any = None


class ScoreFields(ScoreOptionFields, kw_only=True):
    """The JSON fields of `POST /score`: vLLM's, in each of its spellings."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


SCORE_FIELDS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""vLLM's names of the texts of both sides."""


class DocumentFields(Struct):
    """A document of Cohere's or Jina's that is no mere string."""

    text: str


class RerankFields(ScoreOptionFields, kw_only=True):
    """The JSON fields of `POST /rerank`: those that Cohere's and Jina's have in common, then vLLM's."""

    query: str | None = None
    documents: str | list[str | DocumentFields] | None = None
    top_n: int | None = None
    return_documents: bool | None = None


class _TextPair(NamedTuple):
    """Two texts whose score is asked for, by their places among the prompts; the same place where they are one."""

    first: int
    second: int


class _PairScores(NamedTuple):
    """The prompts that scores are made of, and how."""

    generation: GenerationRequest
    pairs: tuple[_TextPair, ...]
    activation: LogitActivation

    def score(self, number: int, choices: Sequence[ChoiceState]) -> float:
        """The score of pair `number`; `choices`: one for each prompt."""
        first, second = self.pairs[number]
        vector = vector_of(choices[first])
        if isinstance(self.generation.prompts[first], PairPrompt):
            return activated(vector, self.activation)[0]
        cosine: float = sum(map(mul, vector, vector_of(choices[second])))  # both are normalized
        return cosine


class ScoreRequest(NamedTuple):
    """A checked request for scores. See `PooledRequest`."""

    scores: _PairScores
    prompt_field: str

    @property
    def generation(self) -> GenerationRequest:
        """The prompts: a pair each, or the texts one by one."""
        return self.scores.generation

    @property
    def elements(self) -> int:
        """One for each pair."""
        return len(self.scores.pairs)

    def element(self, number: int, choices: Sequence[ChoiceState]) -> bytes:
        """Returns the JSON of one element of `data`."""
        score = self.scores.score(number, choices)
        return msgspec.json.encode({"index": number, "object": "score", "score": score})

    def body(self, header: ResponseHeader, choices: Sequence[ChoiceState], elements: Sequence[bytes]) -> bytes:
        """Returns the JSON of a response. `elements`: those of `data`."""
        return list_body(header, choices, elements)


class RerankRequest(NamedTuple):
    """A checked request for documents in the order of their relevance. See `PooledRequest`."""

    scores: _PairScores
    documents: tuple[str, ...]
    """As the response has them; empty where it has none."""
    top_n: int
    """So many results at most."""
    cohere: bool
    """Whether the response has the fields of version 2 of Cohere's API."""

    @property
    def generation(self) -> GenerationRequest:
        """The prompts: the query with each document, or all texts one by one."""
        return self.scores.generation

    @property
    def prompt_field(self) -> str:
        """`documents`."""
        return "documents"

    @property
    def elements(self) -> int:
        """One for each document."""
        return len(self.scores.pairs)

    def element(self, number: int, choices: Sequence[ChoiceState]) -> float:
        """Returns the relevance of one document."""
        return self.scores.score(number, choices)

    def body(self, header: ResponseHeader, choices: Sequence[ChoiceState], elements: Sequence[float]) -> bytes:
        """Returns the JSON of a response, the most relevant first; equals in their own order. `elements`: the
        relevance of each document."""
        order = sorted(range(len(elements)), key=lambda number: (-elements[number], number))[: self.top_n]
        results = []
        for number in order:
            result: dict[str, Any] = {"index": number, "relevance_score": elements[number]}
            if self.documents:
                result["document"] = {"text": self.documents[number]}
            results.append(result)
        usage = pooled_usage(choices)
        answer: dict[str, Any] = {"id": header.shown_id or header.id, "model": header.model, "usage": usage}
        answer["results"] = results
        if self.cohere:
            answer["meta"] = {"api_version": {"version": "2"}, "tokens": {"input_tokens": usage["prompt_tokens"]}}
        return msgspec.json.encode(answer)


_UNSUPPORTED = {
    "max_chunks_per_doc": "choosing parts of documents",
    "rank_fields": "choosing parts of documents",
    "instruction": "an instruction (of a model that reads one: put it before the query)",
    "chat_template_kwargs": "a variable of the template",
    "relevant_spans": "showing which parts of a document are relevant",
}
_score_decoder = msgspec.json.Decoder(ScoreFields)
_rerank_decoder = msgspec.json.Decoder(RerankFields)


def read_score(body: bytes, cards: list[ModelCard], limits: RequestLimits) -> ScoreRequest:
    """Reads and checks a body. `cards` are the models that are served. Raises RequestError."""
    fields = decode_body(body, _score_decoder)
    card = choose_model(fields.model, cards)
    said = {name for name in chain(*SCORE_FIELDS) if getattr(fields, name) is not None}
    first, second = max(SCORE_FIELDS, key=lambda pair: len(said & {*pair}))
    for name in sorted(said - {first, second}):
        raise invalid(name, f"not allowed together with {first} and {second}")
    ones, others = _texts(first, getattr(fields, first)), _texts(second, getattr(fields, second))
    if len(ones) not in (1, len(others)):
        counts = f"{len(ones)} texts beside {len(others)} in {second} are not allowed"
        raise invalid(first, f"{counts}; one, or as many")
    scores = _pair_scores("score", ones, others, second, fields, card, limits)
    return ScoreRequest(scores, second)


def read_rerank(body: bytes, cards: list[ModelCard], limits: RequestLimits, *, cohere: bool = False) -> RerankRequest:
    """Reads and checks a body. `cohere`: of `/v2/rerank`, whose responses have no documents unless they are asked for.
    Raises RequestError."""
    fields = decode_body(body, _rerank_decoder)
    card = choose_model(fields.model, cards)
    if fields.query is None:
        raise invalid("query", "this field is required")
    given = [fields.documents] if isinstance(fields.documents, str) else fields.documents or ()
    documents = [each if isinstance(each, str) else each.text for each in given]
    if fields.top_n is not None and fields.top_n < 0:
        raise not_allowed("top_n", fields.top_n, "it must be at least 0, which means all")
    scores = _pair_scores("rerank", [fields.query], _texts("documents", documents), "documents", fields, card, limits)
    shown = not cohere if fields.return_documents is None else fields.return_documents
    return RerankRequest(scores, tuple(documents) if shown else (), fields.top_n or len(documents), cohere)


def _texts(field: str, given: str | list[str] | None) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if texts is None:
        raise invalid(field, "this field is required")
    if not texts:
        raise invalid(field, "[] is not allowed; at least one text is needed")
    return texts


def _pair_scores(
    kind: GenerationKind,
    ones: list[str],
    others: list[str],
    field: str,
    fields: ScoreOptionFields,
    card: ModelCard,
    limits: RequestLimits,
) -> _PairScores:
    """Of the one, or each of `ones`, with each of `others`. `field`: the client's name of the latter."""
    for name, what in _UNSUPPORTED.items():
        if getattr(fields, name) not in (None, {}, "", {"mode": "disabled"}):
            raise unsupported(name, what)
    if len(others) > limits.max_embeddings:
        raise invalid(field, f"{len(others)} texts are not allowed; at most {limits.max_embeddings} are")
    pooling = pooling_of(card, "embeddings", "labels")
    bounds = (_bound("max_tokens_per_query", fields, card), _bound("max_tokens_per_doc", fields, card))
    prompts: tuple[Prompt, ...]
    if pooling.labels:
        if len(pooling.labels) > 1:
            text = f"model: {card.name} has {len(pooling.labels)} labels, and a score needs one; it serves /classify"
            raise RequestError(400, text, param="model", code="unsupported_parameter")
        queries = ones * len(others) if len(ones) == 1 else ones
        prompts = tuple(PairPrompt(one, other, *bounds) for one, other in zip(queries, others, strict=True))
        pairs = tuple(_TextPair(number, number) for number in range(len(prompts)))
        options = logit_options(pooling)
        activation: LogitActivation = chosen_activation(wants_activation(fields), pooling)
    else:
        for name in (each for each in ACTIVATION_NAMES if getattr(fields, each) is not None):
            raise unsupported(name, "an activation of the cosine of two embeddings")
        prompts = (
            *(TextPrompt(text, text_tokens=bounds[0]) for text in ones),
            *(TextPrompt(text, text_tokens=bounds[1]) for text in others),
        )
        firsts = range(len(ones)) if len(ones) > 1 else [0] * len(others)
        pairs = tuple(_TextPair(one, len(ones) + number) for number, one in enumerate(firsts))
        options, activation = embedding_options(None, normalize=True, pooling=pooling), "none"
    generation = pooled_generation(kind, prompts, options, fields, card, limits)
    return _PairScores(generation, pairs, activation)


def _bound(name: str, fields: ScoreOptionFields, card: ModelCard) -> int | None:
    """How many tokens of a text are read, as the client says in the field `name`; None: all."""
    tokens: int = getattr(fields, name) or 0
    if not 0 <= tokens < card.max_model_len:
        raise not_allowed(name, tokens, f"it must be 1 to {card.max_model_len - 1}, or 0 for all")
    return tokens or None
