"""What requests for vectors of prompts have in common: their fields, and how one becomes a request of each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.gateway.api.errors import RequestError, invalid, not_allowed, unsupported
from services.gateway.api.fields.generation import check_processor_settings, check_request_id
from services.gateway.api.fields.ranges import RANGES
from services.gateway.api.generation import (
    POOLING_ENDPOINTS,
    GenerationKind,
    GenerationRequest,
    RequestLimits,
    choose_alias,
    choose_lora,
)
from services.gateway.api.prompts import chat_prompt, completion_prompts
from services.gateway.api.response import ChoiceState, ResponseHeader, prompt_tokens
from services.gateway.api.sampling import kept_prompt_tokens
from shared.messages.generation import PoolingOptions, SamplingOptions, StopConditions
from shared.messages.model_card import LogitActivation, ModelCard, PooledKind, PoolingCard
from shared.messages.tokenizer import Prompt, TruncationSide

_MAKERS: dict[PooledKind, str] = {
    "embeddings": "makes embeddings and has no labels",
    "labels": "is a classifier",
    "steps": "judges tokens, or the steps of solutions",
}


ACTIVATION_NAMES = ("use_activation", "activation", "softmax")
"""vLLM's names of one field, the newest first."""


class PooledFields(Struct, kw_only=True):
    """The JSON fields that every request for vectors may have. Unknown fields are ignored; null means the default."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    request_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    enable_prefix_caching: bool | None = None
    use_activation: bool | None = None
    """Whether logits go through the model's activation, or embeddings are normalized."""
    activation: bool | None = None
    """vLLM's older name of `use_activation`."""
    softmax: bool | None = None
    """Its oldest."""
    # Not supported. Refused rather than ignored, as the answer would differ from what the client expects.
    mm_processor_kwargs: Any = None
    padding: Any = None


class PooledInputFields(PooledFields, kw_only=True):
    """The fields of requests whose `input` is made into vectors one by one."""

    input: str | list[Any] | None = None
    """Texts, token ids, or chats as in `messages`."""
    messages: list[Any] | None = None
    """In place of `input`: a chat, or a list of chats."""
    add_special_tokens: bool | None = None
    """To a chat, whose template has its own, they are not added by default."""
    add_generation_prompt: bool | None = None
    """False by default: nothing is generated."""
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    # Not supported.
    media_io_kwargs: Any = None


class PooledRequest(Protocol):
    """A checked request for vectors, and how its response is written. Immutable; is pickled."""

    @property
    def generation(self) -> GenerationRequest:
        """The prompts, each of which becomes a vector."""

    @property
    def prompt_field(self) -> str:
        """The client's name of the prompts, for errors."""

    @property
    def elements(self) -> int:
        """Number of elements of the response."""

    def element(self, number: int, choices: Sequence[ChoiceState]) -> bytes | float:
        """Element `number` of the response; `choices`: one for each prompt, with its vector."""

    def body(self, header: ResponseHeader, choices: Sequence[ChoiceState], elements: Sequence[Any]) -> bytes:
        """The JSON of the response; `elements`: all that `element` has returned."""


def pooling_of(card: ModelCard, *serves: PooledKind) -> PoolingCard:
    """Returns how the model makes vectors. Raises RequestError 400 where it makes none, or others than `serves`; with
    none of these any are."""
    if card.pooling is None:
        text = f"{card.name} is not served for embeddings; its worker needs --pooling-type"
        raise RequestError(400, f"model: {text}", param="model", code="unsupported_parameter")
    makes = card.pooling.makes
    if serves and makes not in serves:
        text = f"model: {card.name} {_MAKERS[makes]}; it serves {POOLING_ENDPOINTS[makes]}"
        raise RequestError(400, text, param="model", code="unsupported_parameter")
    return card.pooling


def input_prompts(fields: PooledInputFields, card: ModelCard, limits: RequestLimits) -> tuple[Prompt, ...]:
    """Returns the prompts of `input`. Raises RequestError 400."""
    if fields.messages is not None and fields.input:
        raise invalid("messages", "not allowed together with input")
    if fields.media_io_kwargs:
        raise unsupported("media_io_kwargs", "how media are read")
    field = "input" if fields.messages is None else "messages"
    given = fields.input if fields.messages is None else fields.messages
    if given is None:
        raise invalid("input", "this field is required")
    inputs: tuple[Prompt, ...]
    if fields.messages is not None or _are_chats(given):
        chats: list[Any] = [given] if all(isinstance(each, dict) for each in given) else list(given)
        if not all(isinstance(chat, list) and all(isinstance(each, dict) for each in chat) for chat in chats):
            raise not_allowed(field, given, "a list of messages, or a list of such lists")
        shown = replace(fields, add_generation_prompt=bool(fields.add_generation_prompt))
        inputs = tuple(chat_prompt(chat, shown, limits) for chat in chats)
    else:
        special = fields.add_special_tokens is not False
        inputs = completion_prompts(given, card, add_special_tokens=special, field="input")
    if len(inputs) > limits.max_embeddings:
        raise invalid("input", f"{len(inputs)} inputs are not allowed; at most {limits.max_embeddings} are")
    return inputs


def _are_chats(given: str | list[Any]) -> bool:
    """Whether `input` has messages, as vLLM's may."""
    first = given[0] if given and isinstance(given, list) else None
    return isinstance(first, dict) or (isinstance(first, list) and bool(first) and isinstance(first[0], dict))


def embedding_options(dimensions: int | None, normalize: bool | None, pooling: PoolingCard) -> PoolingOptions:
    """Returns how an embedding is made; None: as the model says. Raises RequestError 400 for other dimensions than the
    model has."""
    return PoolingOptions(
        pooling=pooling.pooling,
        dimensions=_dimensions(dimensions, pooling),
        normalize=pooling.normalize if normalize is None else normalize,
        whole=pooling.whole,
    )


def logit_options(pooling: PoolingCard) -> PoolingOptions:
    """Returns how a classifier's logits are made."""
    return PoolingOptions(
        pooling=pooling.pooling,
        dimensions=pooling.size,
        normalize=False,
        whole=pooling.whole,
        step_tag_id=pooling.step_tag_id,
    )


def wants_activation(fields: PooledFields) -> bool | None:
    """Returns what `use_activation` says, by any of its names. Raises RequestError 400 where two of them differ."""
    said = {name: getattr(fields, name) for name in ACTIVATION_NAMES if getattr(fields, name) is not None}
    if len(set(said.values())) > 1:
        *others, last = said
        raise not_allowed(last, said[last], f"{' and '.join(others)} must say the same")
    return next(iter(said.values()), None)


def chosen_activation(use_activation: bool | None, pooling: PoolingCard) -> LogitActivation:
    """Returns what a classifier's logits go through; None: what the engine's settings say, or else its files."""
    activated = pooling.activated if use_activation is None else use_activation
    return pooling.activation if activated else "none"


def pooled_generation(
    kind: GenerationKind,
    prompts: tuple[Prompt, ...],
    options: PoolingOptions,
    fields: PooledFields,
    card: ModelCard,
    limits: RequestLimits,
) -> GenerationRequest:
    """Returns the request of all prompts. Raises RequestError 400 for a field out of its range."""
    if fields.priority is not None and fields.priority not in RANGES["priority"]:
        raise not_allowed("priority", fields.priority, f"it must be {RANGES['priority']}")
    check_request_id(fields.request_id)
    check_processor_settings(fields.mm_processor_kwargs)
    if fields.padding not in (None, "do_not_pad"):
        raise not_allowed("padding", fields.padding, "only 'do_not_pad' is")
    if fields.cache_salt is not None and not 1 <= len(fields.cache_salt) <= 256:
        raise invalid("cache_salt", "it must have 1 to 256 characters")
    keep = fields.truncate_prompt_tokens
    return GenerationRequest(
        kind=kind,
        model=card,
        lora=choose_lora(fields.model, card),
        alias=choose_alias(fields.model, card),
        prompts=prompts,
        n=1,
        seed=None,
        sampling=SamplingOptions(seed=0, temperature=0.0),
        stopping=StopConditions(max_tokens=0),
        stream=None,
        truncate_prompt_tokens=None if keep is None else _kept_tokens(keep, card),
        truncation_side=fields.truncation_side or "right",  # as vLLM and sentence-transformers, for vectors
        request_id=fields.request_id,
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt,
        # Nothing that an encoder computes of a prompt's beginning is true of another prompt.
        prefix_caching=limits.allow_prefix_caching and fields.enable_prefix_caching is not False and not options.whole,
        pooling=options,
    )


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


def list_body(header: ResponseHeader, choices: Sequence[ChoiceState], data: Sequence[bytes]) -> bytes:
    """Returns the JSON of a response whose elements are the JSON in `data`."""
    rest = {
        "object": "list",
        "id": header.shown_id or header.id,
        "created": header.created,
        "model": header.model,
        "usage": pooled_usage(choices),
    }
    # Joined once: what is large is here in two copies as it is.
    parts = [piece for element in data for piece in (b",", element)]
    return b"".join([msgspec.json.encode(rest)[:-1], b',"data":[', *parts[1:], b"]}"])


def pooled_usage(choices: Sequence[ChoiceState]) -> dict[str, Any]:
    """Returns `usage` of a response without output tokens."""
    tokens = prompt_tokens(choices)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    return usage | {"prompt_tokens_details": None, "completion_tokens_details": None}
