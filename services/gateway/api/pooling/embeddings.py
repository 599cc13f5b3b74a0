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
)
from services.gateway.api.response import ChoiceState, ResponseHeader
from shared.messages.model_card import LogitActivation, ModelCard

EncodingFormat = Literal["float", "base64"]


class EmbeddingFields(PooledInputFields, kw_only=True):
    """The JSON fields of a request for embeddings: OpenAI's, then vLLM's."""

    encoding_format: EncodingFormat | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    """vLLM's other name of `normalize`."""
    embed_dtype: Literal["float32"] | None = None
    """There is no other one."""
    endianness: Literal["native", "little"] | None = None
    """Both are the same on all processors that are served."""


class PoolingFields(EmbeddingFields, kw_only=True):
    """The JSON fields of `POST /pooling`: vLLM's."""

    task: str | None = None
    # Not supported. Refused rather than ignored, as the answer would differ from what the client expects.
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None


class EmbeddingRequest(NamedTuple):
    """A checked request for embeddings. See `PooledRequest`."""

    generation: GenerationRequest
    encoding: EncodingFormat
    activation: LogitActivation = "none"
    """What the elements of each vector go through."""
    each_token: bool = False
    """Whether an input has a vector for each of its tokens."""

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
        vectors = [activated(whole[at : at + width], self.activation) for at in range(0, len(whole), width)]
        data: Any = vectors if self.each_token else vectors[0]
        if self.encoding == "base64":
            plain = self.activation == "none"
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
    card = choose_model(fields.model, cards)
    pooling = pooling_of(card, "embeddings")
    prompts = input_prompts(fields, card, limits)
    normalize = fields.use_activation if fields.normalize is None else fields.normalize
    options = embedding_options(fields.dimensions, normalize, pooling)
    generation = pooled_generation("embedding", prompts, options, fields, card, limits)
    return EmbeddingRequest(generation, fields.encoding_format or "float")


def read_pooling_request(body: bytes, cards: list[ModelCard], limits: RequestLimits) -> EmbeddingRequest:
    """Reads and checks a body of `POST /pooling`. Raises RequestError."""
    fields = decode_body(body, _pooling_decoder)
    card = choose_model(fields.model, cards)
    pooling = pooling_of(card)
    tasks = ("classify", "token_classify") if pooling.labels else ("embed", "token_embed")
    if fields.task not in (None, *tasks):
        raise not_allowed("task", fields.task, f"this model serves {tasks[0]!r} and {tasks[1]!r}")
    for name in ("step_tag_id", "returned_token_ids"):
        if getattr(fields, name) is not None:
            raise unsupported(name, "pooling by steps")
    prompts = input_prompts(fields, card, limits)
    if pooling.labels:
        for name in ("dimensions", "normalize"):
            if getattr(fields, name) is not None:
                raise unsupported(name, "a classifier's vectors")
        options = logit_options(pooling)
        activation: LogitActivation = chosen_activation(fields.use_activation, pooling)
    else:
        normalize = fields.use_activation if fields.normalize is None else fields.normalize
        options, activation = embedding_options(fields.dimensions, normalize, pooling), "none"
    if fields.task == tasks[1]:
        options = replace(options, pooling="all")
    generation = pooled_generation("pooling", prompts, options, fields, card, limits)
    return EmbeddingRequest(generation, fields.encoding_format or "float", activation, fields.task == tasks[1])
