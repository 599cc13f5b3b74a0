"""`POST /api/embed`, and `/api/embeddings`, its older form of one prompt: vectors as Ollama's API has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from services.gateway.api.errors import RequestError, decode_body, invalid, not_allowed, renamed, unsupported
from services.gateway.api.generation import GenerationRequest, RequestLimits
from services.gateway.api.ollama.request import OptionFields, check_context, named_card
from services.gateway.api.pooling.activation import vector_of
from services.gateway.api.pooling.embeddings import EmbeddingFields, embedding_generation
from services.gateway.api.response import ChoiceState, ResponseHeader, prompt_tokens
from shared.messages.model_card import ModelCard


class OllamaVectorFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON fields of both endpoints."""

    model: str
    options: OptionFields | None = None
    """Of these `num_ctx` alone is about vectors."""
    keep_alive: float | str | None = None


class OllamaEmbedFields(OllamaVectorFields, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `POST /api/embed`."""

    input: str | list[str]
    truncate: bool | None = None
    """Whether a text that is too long loses its end; by default it does."""
    dimensions: int | None = None


class OllamaEmbeddingsFields(OllamaVectorFields, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `POST /api/embeddings`."""

    prompt: str


class OllamaEmbedRequest(NamedTuple):
    """A checked request for embeddings. See `PooledRequest`."""

    generation: GenerationRequest
    prompt_field: str
    alone: bool
    """Whether the answer has one vector and nothing else, as that of `/api/embeddings`."""

    @property
    def elements(self) -> int:
        """One for each text."""
        return len(self.generation.prompts)

    def element(self, number: int, choices: Sequence[ChoiceState]) -> bytes:
        """Returns the JSON of one text's vector."""
        return msgspec.json.encode(vector_of(choices[number]))

    def body(self, header: ResponseHeader, choices: Sequence[ChoiceState], elements: Sequence[bytes]) -> bytes:
        """Returns the JSON of a response. `elements`: the vectors."""
        if self.alone:
            return b'{"embedding":%b}' % elements[0]
        rest = msgspec.json.encode({"model": header.model, "prompt_eval_count": prompt_tokens(choices)})
        return b'%b,"embeddings":[%b]}' % (rest[:-1], b",".join(elements))


_decoder = msgspec.json.Decoder(OllamaEmbedFields)
_alone_decoder = msgspec.json.Decoder(OllamaEmbeddingsFields)
_THEIRS = {"truncate_prompt_tokens": "options.num_ctx"}


def read_ollama_embed(body: bytes, cards: list[ModelCard], limits: RequestLimits) -> OllamaEmbedRequest:
    """Reads and checks a body of `/api/embed`. Raises RequestError."""
    fields = decode_body(body, _decoder)
    texts = [fields.input] if isinstance(fields.input, str) else fields.input
    if not texts:
        raise invalid("input", "[] is not allowed; at least one text is needed")
    asked = EmbeddingFields(input=texts, dimensions=fields.dimensions)
    kept = fields.truncate is not False
    return OllamaEmbedRequest(_generation(fields, asked, cards, limits, truncate=kept), "input", alone=False)


def read_ollama_embeddings(body: bytes, cards: list[ModelCard], limits: RequestLimits) -> OllamaEmbedRequest:
    """Reads and checks a body of `/api/embeddings`, whose vector is as the model makes it, of any length. Raises
    RequestError."""
    fields = decode_body(body, _alone_decoder)
    asked = EmbeddingFields(input=[fields.prompt], normalize=False)
    return OllamaEmbedRequest(_generation(fields, asked, cards, limits, truncate=True), "prompt", alone=True)


def _generation(
    fields: OllamaVectorFields, asked: EmbeddingFields, cards: list[ModelCard], limits: RequestLimits, *, truncate: bool
) -> GenerationRequest:
    if fields.keep_alive in (0, "0", "0s"):
        raise unsupported("keep_alive", "unloading a model")
    card = named_card(fields, cards)
    context = None if fields.options is None else fields.options.num_ctx
    check_context(context, card)
    if context is not None and not truncate:
        raise not_allowed("options.num_ctx", context, "with truncate false none is: nothing is cut")
    asked.model = fields.model
    asked.truncate_prompt_tokens = None if not truncate else -1 if context is None else context
    try:
        return embedding_generation(asked, cards, limits)
    except RequestError as error:
        raise renamed(error, _THEIRS) from None
