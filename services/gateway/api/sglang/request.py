"""`POST /generate`: reads the body as a completion. Unknown fields are refused by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.gateway.api.completions import CompletionFields, completion_request
from services.gateway.api.errors import RequestError, decode_body, invalid, not_allowed, renamed, unsupported
from services.gateway.api.fields.sampling import SamplingFields
from services.gateway.api.generation import GenerationRequest, RequestLimits, ResponseOptions
from services.gateway.api.structured_outputs import StructuredOutputs
from shared.messages.model_card import ModelCard

DEFAULT_MAX_TOKENS = 128
NO_LOGPROBS_OF_PROMPT = -1
"""SGLang's `logprob_start_len` without log-probabilities of the prompt."""


class SglangSamplingParams(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """SGLang's `sampling_params`; null means the default."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    no_stop_trim: bool | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    # Not supported.
    stop_regex: str | list[str] | None = None
    custom_params: dict[str, Any] | None = None


class SglangFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `POST /generate`."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: SglangSamplingParams | None = None
    stream: bool | None = None
    model: str | None = None
    lora_path: str | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    priority: int | None = None
    rid: str | None = None
    # Not supported.
    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    token_ids_logprob: Any = None
    return_hidden_states: bool | None = None
    session_params: Any = None
    custom_logit_processor: Any = None


class SglangAnswerOptions(Struct, frozen=True):
    """What the answer shows beside its text."""

    batch: bool
    """A list, as prompts came as one, or there are several choices."""
    rid: str | None
    """The client's id of the request."""
    logprobs: bool = False
    top: int = 0
    texts: bool = False
    """Tokens' texts beside their log-probabilities."""
    prompt_from: int | None = None
    """The first token of the prompt whose log-probability is shown; None: none is."""


class SglangRequest(Struct, frozen=True):
    """A checked request, and what to answer with."""

    generation: GenerationRequest
    options: SglangAnswerOptions


_decoder = msgspec.json.Decoder(SglangFields)

_UNSUPPORTED = {
    "input_embeds": "a prompt as embeddings",
    "image_data": "an image",
    "audio_data": "audio",
    "video_data": "a video",
    "token_ids_logprob": "the log-probability of given tokens",
    "return_hidden_states": "showing hidden states",
    "session_params": "a session",
    "custom_logit_processor": "a logits processor of the client's",
}
_SAME = SamplingFields.__struct_fields__
"""Fields of `sampling_params` that OpenAI's API, or vLLM's, has by the same name."""
_THEIRS = {
    "prompt": "text",
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "structured_outputs.regex": "sampling_params.regex",
    "structured_outputs.grammar": "sampling_params.ebnf",
    "structured_outputs.json": "sampling_params.json_schema",
    "structured_outputs.structural_tag": "sampling_params.structural_tag",
    "structured_outputs": "sampling_params",
    **{name: f"sampling_params.{name}" for name in _SAME},
}


def read_sglang(body: bytes, cards: list[ModelCard], limits: RequestLimits) -> SglangRequest:
    """Reads and checks a body. Raises RequestError."""
    fields = decode_body(body, _decoder)
    for name, what in _UNSUPPORTED.items():
        if getattr(fields, name):
            raise unsupported(name, what)
    if (fields.text is None) == (fields.input_ids is None):
        raise invalid("text", "one of text and input_ids is needed, and not both")
    prompt: str | list[Any] = fields.text if fields.input_ids is None else fields.input_ids  # type: ignore[assignment]
    params = fields.sampling_params or SglangSamplingParams()
    if params.max_new_tokens == 0:
        raise not_allowed("sampling_params.max_new_tokens", 0, "it must be at least 1")
    options = _options(fields, prompt, params)
    completion = _completion(fields, params, prompt, options)
    try:
        generation = completion_request(completion, cards, limits)
    except RequestError as error:
        names = _THEIRS if fields.input_ids is None else {**_THEIRS, "prompt": "input_ids"}
        raise renamed(error, names) from None
    scored = generation.response_options.prompt_logprobs
    wanted = ResponseOptions(
        logprobs=options.logprobs, prompt_logprobs=scored, echo_logprobs=scored, token_ids=scored is not None
    )
    return SglangRequest(replace(generation, kind="sglang", response_options=wanted), options)


def _options(fields: SglangFields, prompt: str | list[Any], params: SglangSamplingParams) -> SglangAnswerOptions:
    several = isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int))
    start = NO_LOGPROBS_OF_PROMPT if fields.logprob_start_len is None else fields.logprob_start_len
    if start < NO_LOGPROBS_OF_PROMPT:
        raise not_allowed("logprob_start_len", start, "it must be at least -1")
    shown = bool(fields.return_logprob)
    if fields.top_logprobs_num and not shown:
        raise invalid("top_logprobs_num", "only allowed with return_logprob")
    if start >= 0 and not shown:
        raise invalid("logprob_start_len", "only allowed with return_logprob")
    if start >= 0 and fields.stream:
        raise unsupported("logprob_start_len", "a stream with log-probabilities of the prompt")
    return SglangAnswerOptions(
        batch=several or (params.n or 1) > 1,
        rid=fields.rid,
        logprobs=shown,
        top=fields.top_logprobs_num or 0,
        texts=bool(fields.return_text_in_logprobs),
        prompt_from=start if start >= 0 else None,
    )


def _completion(
    fields: SglangFields, params: SglangSamplingParams, prompt: str | list[Any], options: SglangAnswerOptions
) -> CompletionFields:
    for name, what in (("stop_regex", "a pattern that stops"), ("custom_params", "what a plug-in of SGLang's reads")):
        if getattr(params, name):
            raise unsupported(f"sampling_params.{name}", what)
    completion = CompletionFields(prompt=prompt, structured_outputs=_structured(params))
    for name in _SAME:
        setattr(completion, name, getattr(params, name))
    completion.model = fields.lora_path or fields.model
    completion.max_tokens = DEFAULT_MAX_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    completion.min_tokens, completion.seed = params.min_new_tokens, params.sampling_seed
    completion.include_stop_str_in_output = params.no_stop_trim
    completion.stream, completion.priority = fields.stream, fields.priority
    completion.logprobs = options.top if options.logprobs else None
    completion.prompt_logprobs = options.top if options.prompt_from is not None else None
    return completion


def _structured(params: SglangSamplingParams) -> StructuredOutputs | None:
    given = [name for name in ("json_schema", "regex", "ebnf", "structural_tag") if getattr(params, name) is not None]
    if len(given) > 1:
        raise invalid(f"sampling_params.{given[1]}", f"not allowed together with {given[0]}")
    if params.json_schema is not None:
        try:
            return StructuredOutputs(json=json.loads(params.json_schema))
        except (ValueError, RecursionError):
            raise not_allowed("sampling_params.json_schema", params.json_schema, "a JSON schema as a text is") from None
    if params.regex is not None:
        return StructuredOutputs(regex=params.regex)
    if params.ebnf is not None:
        return StructuredOutputs(grammar=params.ebnf)
    return None if params.structural_tag is None else StructuredOutputs(structural_tag=params.structural_tag)
