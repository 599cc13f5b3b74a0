"""`POST /v2/embed`: embeddings as version 2 of Cohere's API has them, in the fields that vLLM knows."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from services.gateway.api.errors import RequestError, decode_body, invalid, not_allowed, unsupported
from services.gateway.api.generation import GenerationRequest, RequestLimits, choose_model
from services.gateway.api.pooling.activation import vector_of
from services.gateway.api.pooling.embeddings import EmbeddingFields, embedding_generation
from services.gateway.api.pooling.pooled_request import pooled_usage, pooling_of
from services.gateway.api.response import ChoiceState, ResponseHeader
from shared.messages.model_card import ModelCard, PoolingCard

EmbeddingKind = Literal["float", "base64", "binary", "ubinary"]

PROMPT_NAMES = {"search_query": ("query",), "search_document": ("document", "passage")}
"""What sentence-transformers calls Cohere's types of input; others, such as `clustering`, have the same name."""
INPUT_TYPES = ("search_query", "search_document", "classification", "clustering")
"""Cohere's, one of which its client always sends."""


class CohereEmbedFields(Struct, kw_only=True):
    """The JSON fields of `POST /v2/embed`. Unknown fields are ignored; null means the default."""

    model: str | None = None
    texts: list[str] | None = None
    input_type: str | None = None
    """Which of the model's prompts is put before each text."""
    output_dimension: int | None = None
    embedding_types: list[EmbeddingKind] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    """What is lost of a text that is too long; by default its end."""
    max_tokens: int | None = None
    priority: int | None = None
    # Not supported. Refused rather than ignored, as the answer would differ from what the client expects.
    images: Any = None
    inputs: Any = None


class CohereEmbedRequest(NamedTuple):
    """A checked request for embeddings. See `PooledRequest`."""

    generation: GenerationRequest
    texts: tuple[str, ...]
    """As the response repeats them."""
    kinds: tuple[EmbeddingKind, ...]

    @property
    def prompt_field(self) -> str:
        """`texts`."""
        return "texts"

    @property
    def elements(self) -> int:
        """One for each text."""
        return len(self.texts)

    def element(self, number: int, choices: Sequence[ChoiceState]) -> tuple[bytes, ...]:
        """Returns the JSON of one text's vector in each kind."""
        choice = choices[number]
        return tuple(msgspec.json.encode(_as_kind(choice, kind)) for kind in self.kinds)

    def body(
        self, header: ResponseHeader, choices: Sequence[ChoiceState], elements: Sequence[tuple[bytes, ...]]
    ) -> bytes:
        """Returns the JSON of a response. `elements`: the vectors of each text."""
        columns = zip(*elements, strict=True)
        embeddings = b",".join(
            b'"%b":[%b]' % (kind.encode(), b",".join(column)) for kind, column in zip(self.kinds, columns, strict=True)
        )
        tokens = pooled_usage(choices)["prompt_tokens"]
        rest = {
            "id": header.shown_id or header.id,
            "texts": self.texts,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": tokens, "image_tokens": 0},
            },
            "response_type": "embeddings_by_type",
        }
        return b'%b,"embeddings":{%b}}' % (msgspec.json.encode(rest)[:-1], embeddings)


_decoder = msgspec.json.Decoder(CohereEmbedFields)


def error_body(error: RequestError) -> bytes:
    """Returns the JSON of an error: Cohere's `message`, and OpenAI's object for vLLM's clients."""
    return msgspec.json.encode({"message": error.message, "error": error.fields()})


def read_cohere_embed(body: bytes, cards: list[ModelCard], limits: RequestLimits) -> CohereEmbedRequest:
    """Reads and checks a body. `cards` are the models that are served. Raises RequestError."""
    fields = decode_body(body, _decoder)
    for name in ("images", "inputs"):
        if getattr(fields, name) is not None:
            raise unsupported(name, "anything but texts")
    if not fields.texts:
        raise invalid("texts", "at least one text is needed")
    if len(fields.texts) > limits.max_embeddings:
        raise invalid("texts", f"{len(fields.texts)} are not allowed; at most {limits.max_embeddings} are")
    if fields.truncate == "NONE" and fields.max_tokens is not None:
        raise invalid("max_tokens", "not allowed together with truncate NONE, which keeps all")
    pooling = pooling_of(choose_model(fields.model, cards), "embeddings")
    before = _prompt(fields.input_type, pooling)
    kinds: tuple[EmbeddingKind, ...] = tuple(dict.fromkeys(fields.embedding_types or ("float",)))
    dimensions = pooling.size if fields.output_dimension is None else fields.output_dimension
    if dimensions % 8 and {"binary", "ubinary"} & {*kinds}:
        raise invalid("embedding_types", f"8 numbers become one of binary and ubinary, and vectors have {dimensions}")
    kept = None if fields.truncate == "NONE" else -1 if fields.max_tokens is None else fields.max_tokens
    asked = EmbeddingFields(
        model=fields.model,
        input=[before + text for text in fields.texts],
        dimensions=fields.output_dimension,
        truncate_prompt_tokens=kept,
        truncation_side="left" if fields.truncate == "START" else "right",
        priority=fields.priority,
    )
    return CohereEmbedRequest(embedding_generation(asked, cards, limits), tuple(fields.texts), kinds)


def _prompt(input_type: str | None, pooling: PoolingCard) -> str:
    """What the checkpoint says is put before texts of this type; nothing where it makes no difference between them."""
    if input_type is None or (not pooling.prompts and input_type in INPUT_TYPES):
        return ""
    prompts = dict(pooling.prompts)
    for name in (input_type, *PROMPT_NAMES.get(input_type, ())):
        if name in prompts:
            return prompts[name]
    raise not_allowed("input_type", input_type, f"it must be one of {', '.join(prompts or INPUT_TYPES)}")


def _as_kind(choice: ChoiceState, kind: EmbeddingKind) -> Any:
    """A vector in JSON: numbers, their bytes as float32, or a bit for each that is not negative, eight in a number."""
    if kind == "base64":
        return base64.b64encode(choice.vector).decode()
    vector = vector_of(choice)
    if kind == "float":
        return vector
    signs = int("".join("1" if number >= 0 else "0" for number in vector), 2).to_bytes(len(vector) // 8, "big")
    return list(signs) if kind == "ubinary" else [each - 128 for each in signs]
