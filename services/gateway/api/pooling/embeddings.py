"""`POST /v1/embeddings` and `POST /pooling`: read bodies as requests for vectors of prompts, and write their JSON.
`/pooling` gives whatever vectors a model makes: embeddings, or a classifier's probabilities."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from services.gateway.api.errors import decode_body, not_allowed, unsupported
from services.gateway.api.generation import GenerationRequest, RequestLimits, choose_model
from services.gateway.api.pooling.activation import activated, packed_floats, vector_of
from services.gateway.api.pooling.pooled_request import (
    PooledInputFields,
    chosen_activation,
    embedding_options,
    input_prompts,
    list_body,
    logit_options,
    pooled_generation,
    pooling_of,
    wants_activation,
)
from services.gateway.api.response import ChoiceState, ResponseHeader
from shared.messages.model_card import LogitActivation, ModelCard, PoolingCard

EncodingFormat = Literal["float", "base64"]


class EmbeddingFields(PooledInputFields, kw_only=True):
    """The JSON fields of a request for embeddings: OpenAI's, then vLLM's."""

    encoding_format: EncodingFormat | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    embed_dtype: Literal["float32"] | None = None
    """There is no other one."""
    endianness: Literal["native", "little"] | None = None
    """Both are the same on all processors that are served."""


class PoolingFields(EmbeddingFields, kw_only=True):
    """The JSON fields of `POST /pooling`: vLLM's."""

    task: str | None = None
    step_tag_id: int | None = None
    """Which tokens are judged, of a model that judges steps; by default those that its settings or files say."""
    returned_token_ids: list[int] | None = None
    """What such a model judges by: tokens of a language model, else numbers of labels. By default all that it has."""
    # Not supported.
    data: Any = None


class EmbeddingRequest(NamedTuple):
    """A checked request for embeddings. See `PooledRequest`."""

    generation: GenerationRequest
    encoding: EncodingFormat
    activation: LogitActivation = "none"
    """What the elements of each vector go through."""
    columns: tuple[int, ...] | None = None
    """The elements of each vector that are returned, and are put through `activation`; None: all."""

    @property
    def prompt_field(self) -> str:
        """`input`."""
        return "input"

    @property
    def elements(self) -> int:
        """One for each input."""
        return len(self.generation.prompts)

    def element(self, number: int, choices: Sequence[ChoiceState]) -> bytes:
        """Returns the JSON of one element of `data`."""
        choice = choices[number]
        pooling = self.generation.pooling
        assert pooling is not None, "that is what was asked for"
        width, whole = pooling.dimensions, vector_of(choice)
        parts: list[Sequence[float]] = [whole[at : at + width] for at in range(0, len(whole), width)]
        if self.columns is not None:
            parts = [[part[column] for column in self.columns] for part in parts]
        vectors = [activated(part, self.activation) for part in parts]
        data: Any = vectors if pooling.pooling == "all" else vectors[0]
        if self.encoding == "base64":
            plain = self.activation == "none" and self.columns is None
            data = base64.b64encode(choice.vector if plain else b"".join(map(packed_floats, vectors))).decode()
        kind, field = ("embedding", "embedding") if self.generation.kind == "embedding" else ("pooling", "data")
        return msgspec.json.encode({"object": kind, "index": choice.index, field: data})

    def body(self, header: ResponseHeader, choices: Sequence[ChoiceState], elements: Sequence[bytes]) -> bytes:
        """Returns the JSON of a response. `elements`: those of `data`."""
        return list_body(header, choices, elements)


_decoder = msgspec.json.Decoder(EmbeddingFields)
_pooling_decoder = msgspec.json.Decoder(PoolingFields)


def read_embedding(body: bytes, cards: list[ModelCard], limits: RequestLimits) -> EmbeddingRequest:
    """Reads and checks a body. `cards` are the models that are served. Raises RequestError."""
    fields = decode_body(body, _decoder)
    return EmbeddingRequest(embedding_generation(fields, cards, limits), fields.encoding_format or "float")


def embedding_generation(fields: EmbeddingFields, cards: list[ModelCard], limits: RequestLimits) -> GenerationRequest:
    """Returns the request of all inputs. Raises RequestError."""
    card = choose_model(fields.model, cards)
    pooling = pooling_of(card, "embeddings")
    prompts = input_prompts(fields, card, limits)
    normalize = wants_activation(fields) if fields.normalize is None else fields.normalize
    options = embedding_options(fields.dimensions, normalize, pooling)
    return pooled_generation("embedding", prompts, options, fields, card, limits)


def read_pooling_request(body: bytes, cards: list[ModelCard], limits: RequestLimits) -> EmbeddingRequest:
    """Reads and checks a body of `POST /pooling`. Raises RequestError."""
    fields = decode_body(body, _pooling_decoder)
    card = choose_model(fields.model, cards)
    pooling = pooling_of(card)
    if fields.data is not None:
        raise unsupported("data", "what a plug-in reads")
    tasks = _pooling_tasks(pooling)
    if fields.task not in (None, *tasks):
        raise not_allowed("task", fields.task, f"this model serves {' and '.join(map(repr, tasks))}")
    if pooling.makes != "steps":
        for name in ("step_tag_id", "returned_token_ids"):
            if getattr(fields, name) is not None:
                raise unsupported(name, "pooling by steps, without --pooling-type step,")
    prompts = input_prompts(fields, card, limits)
    if pooling.labels:
        for name in ("dimensions", "normalize"):
            if getattr(fields, name) is not None:
                raise unsupported(name, "a classifier's vectors")
        options = logit_options(pooling)
        activation: LogitActivation = chosen_activation(wants_activation(fields), pooling)
    else:
        normalize = wants_activation(fields) if fields.normalize is None else fields.normalize
        options, activation = embedding_options(fields.dimensions, normalize, pooling), "none"
    if fields.task in ("token_classify", "token_embed"):
        options = replace(options, pooling="all")
    if fields.step_tag_id is not None:
        options = replace(options, step_tag_id=_step_tag(fields.step_tag_id, card))
    columns = None if fields.returned_token_ids is None else _columns(fields.returned_token_ids, pooling)
    generation = pooled_generation("pooling", prompts, options, fields, card, limits)
    return EmbeddingRequest(generation, fields.encoding_format or "float", activation, columns)


def _pooling_tasks(pooling: PoolingCard) -> tuple[str, ...]:
    """What `task` may be, without which it is the first."""
    if pooling.makes == "steps":
        return ("token_classify",)
    return ("classify", "token_classify") if pooling.labels else ("embed", "token_embed")


def _step_tag(given: int, card: ModelCard) -> int:
    if not 0 <= given < card.vocab_size:
        raise not_allowed("step_tag_id", given, f"{card.name} has the tokens 0 to {card.vocab_size - 1}")
    return given


def _columns(given: list[int], pooling: PoolingCard) -> tuple[int, ...]:
    """Where a vector has what is said of these tokens, or of labels by their numbers."""
    allowed = pooling.token_ids or tuple(range(pooling.size))
    if not given or len(set(given)) != len(given) or not set(given) <= set(allowed):
        text = f"this model judges by {', '.join(map(str, allowed))}; some of these, each once, may be asked for"
        raise not_allowed("returned_token_ids", given, text)
    return tuple(map(allowed.index, given))
