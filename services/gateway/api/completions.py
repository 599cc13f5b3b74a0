"""`POST /v1/completions`: reads the body as a generation request."""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.api.errors import decode_body, unsupported
from services.gateway.api.generation import (
    CommonFields,
    GenerationRequest,
    RequestLimits,
    ResponseOptions,
    check_common_fields,
    choose_model,
    stream_options,
)
from services.gateway.api.prompts import completion_prompts
from services.gateway.api.sampling import (
    bad_words,
    beam_search_params,
    completion_logprobs_request,
    kept_prompt_tokens,
    sampling_params,
    stop_params,
)
from services.gateway.api.structured_outputs import read_output_grammar
from shared.messages.lifecycle import ModelCard

DEFAULT_MAX_TOKENS = 16


class CompletionFields(CommonFields, kw_only=True):
    """The JSON fields that only completions have."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


_decoder = msgspec.json.Decoder(CompletionFields)


def read_completion(body: bytes, cards: list[ModelCard], limits: RequestLimits) -> GenerationRequest:
    """Reads and checks a body. `cards` are the models that are served. Raises RequestError."""
    fields = decode_body(body, _decoder)
    card = choose_model(fields.model, cards)
    only_echo = bool(fields.echo) and fields.max_tokens == 0
    prompts = completion_prompts(fields.prompt, card, add_special_tokens=fields.add_special_tokens is not False)
    check_common_fields(fields, len(prompts), limits, unchecked="max_tokens" if only_echo else "")
    if fields.suffix:
        raise unsupported("suffix", "a suffix")
    max_tokens = 1 if only_echo else DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    logprobs = completion_logprobs_request(fields, fields.logprobs, bool(fields.echo), card, limits)
    keep = fields.truncate_prompt_tokens
    return GenerationRequest(
        kind="completion",
        model=card,
        prompts=prompts,
        n=fields.n or 1,
        seed=fields.seed,
        sampling=sampling_params(fields, logprobs, card, limits),
        stopping=stop_params(fields, max_tokens, card, limits),
        stream=stream_options(fields) if fields.stream or fields.stream_options else None,
        echo=bool(fields.echo),
        only_echo=only_echo,
        response_options=ResponseOptions(
            logprobs=logprobs.most_likely is not None,
            prompt_logprobs=None if fields.prompt_logprobs is None else logprobs.of_prompt,
            echo_logprobs=logprobs.most_likely if fields.echo and fields.logprobs is not None else None,
            token_ids=bool(fields.return_token_ids),
            tokens_as_ids=bool(fields.return_tokens_as_token_ids),
        ),
        bad_words=bad_words(fields.bad_words, limits) if fields.bad_words else (),
        truncate_prompt_tokens=None if keep is None else kept_prompt_tokens(keep, max_tokens, card),
        beam_search=beam_search_params(fields, limits),
        skip_special_tokens=fields.skip_special_tokens is not False,
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt,
        output_grammar=read_output_grammar(fields),
    )
