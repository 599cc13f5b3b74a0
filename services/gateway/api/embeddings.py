"""`POST /v1/embeddings`: reads the body as a request that makes vectors of prompts, and writes their JSON."""

from __future__ import annotations

import base64
import struct
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from services.gateway.api.errors import RequestError, decode_body, invalid, not_allowed, unsupported
from services.gateway.api.generation import (
    RANGES,
    GenerationRequest,
    RequestLimits,
    choose_model,
)
from services.gateway.api.prompts import completion_prompts
from services.gateway.api.response import ChoiceState, ResponseHeader, prompt_tokens
from services.gateway.api.sampling import kept_prompt_tokens
from shared.messages.generation import PoolingOptions, SamplingOptions, StopConditions
from shared.messages.lifecycle import ModelCard, PoolingCard

EncodingFormat = Literal["float", "base64"]
FLOAT_BYTES = 4


class EmbeddingFields(Struct, kw_only=True):
    """The JSON fields of a request for embeddings: OpenAI's, then vLLM's. Unknown fields are ignored; null means the
    default."""

    input: str | list[Any] | None = None
    model: str | None = None
    encoding_format: EncodingFormat | None = None
    dimensions: int | None = None
    user: str | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    enable_prefix_caching: bool | None = None
    # Not supported. Refused rather than ignored, as the answer would differ from what the client expects.
    messages: Any = None


class EmbeddingRequest(NamedTuple):
    """A checked request for embeddings."""

    generation: GenerationRequest
    encoding: EncodingFormat


_decoder = msgspec.json.Decoder(EmbeddingFields)


def read_embedding(body: bytes, cards: list[ModelCard], limits: RequestLimits) -> EmbeddingRequest:
    """Reads and checks a body. `cards` are the models that are served. Raises RequestError."""
    fields = decode_body(body, _decoder)
    card = choose_model(fields.model, cards)
    pooling = _pooling_of(card)
    if fields.messages is not None:
        raise unsupported("messages", "an embedding of a chat")
    if fields.input is None:
        raise invalid("input", "this field is required")
    special = fields.add_special_tokens is not False
    inputs = completion_prompts(fields.input, card, add_special_tokens=special, field="input")
    if len(inputs) > limits.max_embeddings:
        raise invalid("input", f"{len(inputs)} inputs are not allowed; at most {limits.max_embeddings} are")
    if fields.priority is not None and fields.priority not in RANGES["priority"]:
        raise not_allowed("priority", fields.priority, f"it must be {RANGES['priority']}")
    if fields.cache_salt is not None and not 1 <= len(fields.cache_salt) <= 256:
        raise invalid("cache_salt", "it must have 1 to 256 characters")
    keep = fields.truncate_prompt_tokens
    generation = GenerationRequest(
        kind="embedding",
        model=card,
        prompts=inputs,
        n=1,
        seed=None,
        sampling=SamplingOptions(seed=0, temperature=0.0),
        stopping=StopConditions(max_tokens=0),
        stream=None,
        truncate_prompt_tokens=None if keep is None else _kept_tokens(keep, card),
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt,
        prefix_caching=limits.allow_prefix_caching and fields.enable_prefix_caching is not False,
        pooling=PoolingOptions(
            pooling=pooling.pooling,
            dimensions=_dimensions(fields.dimensions, pooling),
            normalize=pooling.normalize if fields.normalize is None else fields.normalize,
        ),
    )
    return EmbeddingRequest(generation, fields.encoding_format or "float")


def _pooling_of(card: ModelCard) -> PoolingCard:
    if card.pooling is None:
        text = f"{card.name} is not served for embeddings; its worker needs --pooling-type last, mean or cls"
        raise RequestError(400, f"model: {text}", param="model", code="unsupported_parameter")
    return card.pooling


def _dimensions(asked: int | None, pooling: PoolingCard) -> int:
    if asked is None:
        return pooling.size
    if pooling.matryoshka and asked not in pooling.matryoshka:
        allowed = ", ".join(map(str, pooling.matryoshka))
        raise not_allowed("dimensions", asked, f"this model's embeddings may be cut to {allowed}")
    if not 1 <= asked <= pooling.size:
        raise not_allowed("dimensions", asked, f"it must be 1 to {pooling.size}")
    return asked


def _kept_tokens(given: int, card: ModelCard) -> int:
    """See `kept_prompt_tokens`; there is no output to leave room for."""
    return card.max_model_len if given == -1 else kept_prompt_tokens(given, None, card)


def encode_embedding(choice: ChoiceState, encoding: EncodingFormat) -> bytes:
    """Returns the JSON of one element of `data`."""
    embedding: Any
    if encoding == "base64":
        embedding = base64.b64encode(choice.vector).decode()
    else:
        embedding = struct.unpack(f"<{len(choice.vector) // FLOAT_BYTES}f", choice.vector)
    return msgspec.json.encode({"object": "embedding", "index": choice.index, "embedding": embedding})


def embedding_body(header: ResponseHeader, choices: list[ChoiceState], data: list[bytes]) -> bytes:
    """Returns the JSON of a response. `data`: its elements, by `encode_embedding`."""
    tokens = prompt_tokens(choices)
    rest = {
        "object": "list",
        "id": header.id,
        "created": header.created,
        "model": header.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return b"%b,%b]}" % (msgspec.json.encode(rest)[:-1], b'"data":[' + b",".join(data))
