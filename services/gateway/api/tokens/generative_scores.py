"""`POST /generative_scoring`: how likely a model that generates takes given tokens to be next, behind a query with each
of several items. Reads the body as a completion of one token for each item. As by vLLM, unknown fields are ignored."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.gateway.api.completions import CompletionFields, completion_request
from services.gateway.api.errors import RequestError, decode_body, invalid, renamed
from services.gateway.api.generation import GenerationRequest, RequestLimits
from services.gateway.api.logprobs import logprobs_by_id
from services.gateway.api.prompts import token_prompt
from services.gateway.api.response import ChoiceState, ResponseHeader, usage
from shared.messages.model_card import ModelCard
from shared.messages.tokenizer import TextPrompt, TokenPrompt


class GenerativeScoreFields(Struct, kw_only=True):
    """The JSON of `POST /generative_scoring`."""

    query: str | list[int]
    items: list[str | list[int]]
    label_token_ids: list[int]
    model: str | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None


class GenerativeScoreRequest(Struct, frozen=True):
    """A checked request: its prompts are the items, each of which is to be joined with the query."""

    generation: GenerationRequest
    query: TextPrompt | TokenPrompt
    item_first: bool
    labels: tuple[int, ...]
    softmax: bool
    """Probabilities among the labels, rather than among all tokens."""


MAX_EXPONENT = 700.0
"""Beyond it `exp` overflows; the score is 0 long before."""
_decoder = msgspec.json.Decoder(GenerativeScoreFields)
_THEIRS = {"prompt": "items", "n": "items", "logprob_token_ids": "label_token_ids"}


def read_generative_scores(body: bytes, cards: list[ModelCard], limits: RequestLimits) -> GenerativeScoreRequest:
    """Reads and checks a body. Raises RequestError."""
    fields = decode_body(body, _decoder)
    if len({type(item) for item in fields.items}) > 1:
        raise invalid("items", "texts and token ids are not allowed together")
    completion = CompletionFields(prompt=fields.items, model=fields.model, max_tokens=1, temperature=0)
    completion.logprobs, completion.logprob_token_ids = 0, fields.label_token_ids
    completion.add_special_tokens = False  # the query has them
    completion.cache_salt, completion.priority = fields.cache_salt, fields.priority
    completion.request_id = fields.request_id
    try:
        generation = completion_request(completion, cards, limits)
    except RequestError as error:
        raise renamed(error, _THEIRS) from None
    query: TextPrompt | TokenPrompt
    if isinstance(fields.query, str):
        query = TextPrompt(fields.query, fields.add_special_tokens is not False)
    else:
        query = token_prompt("query", fields.query, generation.model)
    return GenerativeScoreRequest(
        generation=replace(generation, kind="generative_score"),
        query=query,
        item_first=bool(fields.item_first),
        labels=tuple(dict.fromkeys(fields.label_token_ids)),
        softmax=fields.apply_softmax is not False,
    )


def joined(asked: GenerativeScoreRequest, query: list[int], item: list[int]) -> list[int]:
    """Returns the prompt of an item, cut at its end to leave room for one token in the model's context."""
    tokens = [*item, *query] if asked.item_first else [*query, *item]
    return tokens[: asked.generation.model.max_model_len - 1]


def scores_answer(header: ResponseHeader, choices: list[ChoiceState], asked: GenerativeScoreRequest) -> dict[str, Any]:
    """Returns the body: of each item how likely the first label is."""
    scores = [{"index": choice.index, "object": "score", "score": _score(choice, asked)} for choice in choices]
    return {
        "id": header.shown_id or header.id,
        "object": "list",
        "created": header.created,
        "model": header.model,
        "data": scores,
        "usage": usage(choices),
    }


def _score(choice: ChoiceState, asked: GenerativeScoreRequest) -> float:
    [position] = choice.logprobs
    found = logprobs_by_id(position)
    first, *others = (found[label] for label in asked.labels)
    if not asked.softmax:
        return math.exp(first)
    return 1 / (1 + sum(math.exp(min(other - first, MAX_EXPONENT)) for other in others))
