"""`POST /v1/completions`: the body, checked, as a job."""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.api.beams import read_beams
from services.gateway.api.errors import invalid, shown, unsupported
from services.gateway.api.fields import (
    CommonFields,
    check_count,
    check_ranges,
    check_token_ids,
    checked_salt,
    choose_model,
    refuse_unsupported,
    stream_options,
)
from services.gateway.api.job import Job, Limits, Telling
from services.gateway.api.logprobs import completion_logprobs_asked
from services.gateway.api.reading import read
from services.gateway.api.sampling import bad_words, sampling_params, stop_params, truncation
from services.gateway.api.structured import read_guided
from shared.messages.lifecycle import ModelCard
from shared.messages.tokenizer import Prompt, TextPrompt, TokenPrompt
from shared.tokens import pack

DEFAULT_MAX_TOKENS = 16


class CompletionFields(CommonFields, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


_decoder = msgspec.json.Decoder(CompletionFields)


def read_completion(body: bytes, cards: list[ModelCard], limits: Limits) -> Job:
    """Raises ApiError."""
    fields = read(body, _decoder)
    card = choose_model(fields.model, cards)
    only_echo = bool(fields.echo) and fields.max_tokens == 0
    check_ranges(fields, but="max_tokens" if only_echo else "")
    refuse_unsupported(fields)
    if fields.suffix:
        raise unsupported("suffix", "a suffix")
    prompts = _prompts(fields, card)
    n = fields.n or 1
    check_count(len(prompts), n, limits)
    max_tokens = 1 if only_echo else DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    asked = completion_logprobs_asked(fields, fields.logprobs, bool(fields.echo), card, limits)
    return Job(
        kind="completion",
        model=card,
        prompts=prompts,
        n=n,
        seed=fields.seed,
        sampling=sampling_params(fields, asked, card, limits),
        stopping=stop_params(fields, max_tokens, card, limits),
        stream=stream_options(fields),
        echo=bool(fields.echo),
        only_echo=only_echo,
        telling=Telling(
            logprobs=asked.most_likely is not None,
            prompt_logprobs=None if fields.prompt_logprobs is None else asked.of_prompt,
            echo_logprobs=asked.most_likely if fields.echo and fields.logprobs is not None else None,
            token_ids=bool(fields.return_token_ids),
            tokens_as_ids=bool(fields.return_tokens_as_token_ids),
        ),
        bad_words=bad_words(fields, limits),
        truncate_prompt_tokens=truncation(fields, max_tokens, card),
        beams=read_beams(fields, limits),
        skip_special_tokens=fields.skip_special_tokens is not False,
        priority=fields.priority or 0,
        cache_salt=checked_salt(fields),
        guided=read_guided(fields),
    )


def _prompts(fields: CompletionFields, card: ModelCard) -> tuple[Prompt, ...]:
    """One string, several, one list of token ids, or several."""
    given = fields.prompt
    special = fields.add_special_tokens is not False
    if isinstance(given, str):
        return (TextPrompt(given, special),)
    if not given:
        raise invalid("prompt", "[] is not allowed; a string, token ids, or a list of either")
    if all(isinstance(item, str) for item in given):
        return tuple(TextPrompt(text, special) for text in given)
    if all(_is_int(item) for item in given):
        return (_token_prompt("prompt", given, card),)
    if all(isinstance(item, list) and all(_is_int(token) for token in item) for item in given):
        return tuple(_token_prompt(f"prompt[{i}]", ids, card) for i, ids in enumerate(given))
    raise invalid("prompt", f"{shown(given)} is not allowed; a string, token ids, or a list of either")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_prompt(name: str, ids: list[int], card: ModelCard) -> TokenPrompt:
    if not ids:
        raise invalid(name, "[] is not allowed; at least one token is needed")
    check_token_ids(name, ids, card)
    return TokenPrompt(pack(ids))
