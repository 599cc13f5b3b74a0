"""`POST /inference/v1/generate`: token ids in, token ids out. Reads the body, which is what vLLM's `/render` endpoints
answer with, as a completion. As by vLLM, unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.gateway.api.completions import CompletionFields, completion_request
from services.gateway.api.errors import RequestError, decode_body, invalid, renamed, unsupported
from services.gateway.api.fields.generation import StreamOptionFields
from services.gateway.api.fields.sampling import VllmSamplingFields
from services.gateway.api.generation import GenerationRequest, RequestLimits
from services.gateway.api.structured_outputs import OutputGrammar
from services.gateway.parsing.output_dialect import OutputDialect
from shared.ids import ModelName
from shared.messages.model_card import ModelCard

OutputMode = Literal["tokens", "text"]


class VllmSamplingParams(VllmSamplingFields, kw_only=True):
    """vLLM's `SamplingParams`; null means the default."""

    logprobs: int | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    detokenize: bool | None = None
    # Not supported.
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: Any = None
    trace_decode_token_ids: Any = None


class TokensFields(Struct, kw_only=True):
    """The JSON of `POST /inference/v1/generate`."""

    token_ids: list[int]
    sampling_params: VllmSamplingParams
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptionFields | None = None
    output_mode: OutputMode | None = None
    return_token_ids: bool | None = None
    reasoning_ended: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    kv_transfer_params: Any = None
    # Not supported.
    ec_transfer_params: Any = None
    features: Any = None
    content_parts: Any = None


class TokensAnswerOptions(Struct, frozen=True):
    """What an answer shows beside its token ids."""

    text: bool
    """The text, and log-probabilities of tokens that are named by their texts."""
    logprobs: int | None
    """How many tokens at each position, the sampled one among them; None: no log-probabilities."""
    ranked: bool
    """Whether these are the most likely ones, rather than those that the client names."""
    prompt_ids: bool


class TokensRequest(Struct, frozen=True):
    """A checked request, and what to answer with."""

    generation: GenerationRequest
    options: TokensAnswerOptions


_decoder = msgspec.json.Decoder(TokensFields)
_SAME = tuple(name for name in VllmSamplingParams.__struct_fields__ if name in CompletionFields.__struct_fields__)
"""Fields of `sampling_params` that completions have by the same name."""
_THEIRS = {
    "prompt": "token_ids",
    "vllm_xargs": "sampling_params.extra_args",
    **{name: f"sampling_params.{name}" for name in _SAME if name != "logprobs"},
    "logprobs": "sampling_params.logprobs",
}
_UNSUPPORTED = {
    "features": "a prompt with images, videos or sounds",
    "content_parts": "a prompt with images, videos or sounds",
}
_UNSUPPORTED_PARAMS = {
    "prompt_logprob_token_ids": "the log-probability of given tokens in a prompt",
    "prompt_logprob_start": "the log-probability of given tokens in a prompt",
    "trace_decode_token_ids": "an output that is given",
}


def read_tokens(
    body: bytes,
    cards: list[ModelCard],
    limits: RequestLimits,
    dialect_of: Callable[[ModelName], OutputDialect] | None,
) -> TokensRequest:
    """Reads and checks a body. Raises RequestError."""
    fields = decode_body(body, _decoder)
    params, text = fields.sampling_params, fields.output_mode == "text"
    for name, what in _UNSUPPORTED.items():
        if getattr(fields, name):
            raise unsupported(name, what)
    for name, what in _UNSUPPORTED_PARAMS.items():
        if getattr(params, name):
            raise unsupported(f"sampling_params.{name}", what)
    if not fields.token_ids:
        raise invalid("token_ids", "[] is not allowed; at least one token is needed")
    if params.detokenize is False and (text or params.stop):
        rule = "must not be false where a text is to be made, or stop strings to be found"
        raise invalid("sampling_params.detokenize", rule)
    if fields.stream and fields.stream_options is not None and fields.stream_options.resumable:
        raise unsupported("stream_options.resumable", "resuming a stream of token ids")
    try:
        generation = completion_request(_completion(fields), cards, limits, default_max_tokens=None)
    except RequestError as error:
        raise renamed(error, _THEIRS) from None
    grammar = generation.output_grammar
    if grammar is not None:
        grammar = _placed(grammar, fields, generation.model, dialect_of)
    sampling = generation.sampling
    named = sampling.logprob_token_ids
    shown = sampling.logprobs if named is None else 1 + len(named)
    options = TokensAnswerOptions(text, shown, named is None, bool(fields.return_token_ids))
    return TokensRequest(replace(generation, kind="tokens", output_grammar=grammar), options)


def _completion(fields: TokensFields) -> CompletionFields:
    params = fields.sampling_params
    completion = CompletionFields(prompt=fields.token_ids)
    for name in _SAME:
        setattr(completion, name, getattr(params, name))
    completion.vllm_xargs = params.extra_args
    completion.enable_prefix_caching = False if params.skip_reading_prefix_cache else None
    completion.model, completion.request_id = fields.model, fields.request_id
    completion.stream = fields.stream
    completion.stream_options = fields.stream_options if fields.stream else None  # vLLM takes them without one, too
    completion.return_token_ids = fields.return_token_ids
    completion.cache_salt, completion.priority = fields.cache_salt, fields.priority
    completion.kv_transfer_params = fields.kv_transfer_params
    completion.ec_transfer_params = fields.ec_transfer_params
    return completion


def _placed(
    grammar: OutputGrammar,
    fields: TokensFields,
    card: ModelCard,
    dialect_of: Callable[[ModelName], OutputDialect] | None,
) -> OutputGrammar:
    """The grammar where it applies: from the first token, or behind reasoning that has not ended."""
    grammar = grammar._replace(field=f"sampling_params.{grammar.field}")
    if fields.reasoning_ended is not False:
        return grammar
    marks = None if dialect_of is None else dialect_of(card.name).marks
    if marks is None:
        raise invalid("reasoning_ended", f"false is not allowed; {card.name} does not reason between marks")
    return grammar._replace(grammar=replace(grammar.grammar, after=marks.end))
