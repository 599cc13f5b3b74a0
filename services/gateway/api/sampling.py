"""How a request's fields come to sampling and stopping parameters for the engine."""

from __future__ import annotations

import math

from services.gateway.api.errors import invalid, shown
from services.gateway.api.fields import CommonFields, check_token_ids
from services.gateway.api.job import Limits
from services.gateway.api.logprobs import AskedLogprobs
from shared.messages.generation import SamplingParams, StopParams
from shared.messages.lifecycle import ModelCard

LOWEST_TEMPERATURE = 0.01
"""Below it, but above 0, division overflows; vLLM lifts such values to this one too."""


def sampling_params(fields: CommonFields, asked: AskedLogprobs, card: ModelCard, limits: Limits) -> SamplingParams:
    """The seed is filled in for each choice, and what is given as text by the tokenizer. Raises ApiError 400."""
    temperature = 1.0 if fields.temperature is None else fields.temperature
    if 0 < temperature < LOWEST_TEMPERATURE:
        temperature = LOWEST_TEMPERATURE
    return SamplingParams(
        seed=0,
        temperature=temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=max(0, fields.top_k or 0),
        min_p=fields.min_p or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        logit_bias=_logit_bias(fields.logit_bias or {}, card, limits),
        logprobs=asked.most_likely,
        allowed_token_ids=_allowed_token_ids(fields.allowed_token_ids, card),
        logprob_token_ids=asked.token_ids,
        prompt_logprobs=asked.of_prompt,
        thinking_budget=fields.thinking_token_budget,
    )


def _allowed_token_ids(ids: list[int] | None, card: ModelCard) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not 1 <= len(ids) <= card.vocab_size:
        raise invalid("allowed_token_ids", f"{len(ids)} ids are not allowed; 1 to {card.vocab_size} are")
    check_token_ids("allowed_token_ids", ids, card)
    return tuple(dict.fromkeys(ids))


def bad_words(fields: CommonFields, limits: Limits) -> tuple[str, ...]:
    """For the tokenizer. Raises ApiError 400."""
    words = fields.bad_words or []
    if len(words) > limits.max_bad_words:
        raise invalid("bad_words", f"{len(words)} words are not allowed; at most {limits.max_bad_words}")
    for word in words:
        if not word.strip() or len(word) > limits.max_bad_word_chars:
            allowed = f"a word has 1 to {limits.max_bad_word_chars} characters, and not only spaces"
            raise invalid("bad_words", f"{shown(word)} is not allowed; {allowed}")
    return tuple(words)


def truncation(fields: CommonFields, max_tokens: int | None, card: ModelCard) -> int | None:
    """How many tokens of the prompt are kept; -1 in the request: as many as fit beside the output."""
    given = fields.truncate_prompt_tokens
    if given is None:
        return None
    if given == -1:
        return max(1, card.max_model_len - (max_tokens or 1))
    if not 1 <= given <= card.max_model_len:
        allowed = f"it must be 1 to {card.max_model_len}, or -1 for as many as the context holds"
        raise invalid("truncate_prompt_tokens", f"{given} is not allowed; {allowed}")
    return given


def _logit_bias(biases: dict[str, float], card: ModelCard, limits: Limits) -> tuple[tuple[int, float], ...]:
    if len(biases) > limits.max_logit_bias:
        raise invalid("logit_bias", f"{len(biases)} entries are not allowed; at most {limits.max_logit_bias}")
    checked = []
    for key, bias in biases.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 12 and int(key) < card.vocab_size):
            allowed = f"keys are token ids below {card.vocab_size}"
            raise invalid("logit_bias", f"key {shown(key)} is not allowed; {allowed}")
        if not math.isfinite(bias):
            raise invalid("logit_bias", f"{shown(bias)} is not allowed; values are finite numbers")
        checked.append((int(key), min(100.0, max(-100.0, bias))))
    return tuple(checked)


def stop_params(fields: CommonFields, max_tokens: int | None, card: ModelCard, limits: Limits) -> StopParams:
    min_tokens = fields.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid("min_tokens", f"{min_tokens} is not allowed; it must be at most max_tokens ({max_tokens})")
    if min_tokens > card.max_model_len:
        allowed = f"it must be at most the model's context ({card.max_model_len})"
        raise invalid("min_tokens", f"{min_tokens} is not allowed; {allowed}")
    return StopParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=_stop_strings(fields.stop, limits),
        stop_token_ids=_stop_token_ids(fields.stop_token_ids or [], card, limits),
        ignore_eos=bool(fields.ignore_eos),
        include_stop=bool(fields.include_stop_str_in_output),
    )


def _stop_strings(stop: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > limits.max_stop:
        raise invalid("stop", f"{len(strings)} stop strings are not allowed; at most {limits.max_stop}")
    for string in strings:
        if not 1 <= len(string) <= limits.max_stop_chars:
            raise invalid(
                "stop", f"{shown(string)} is not allowed; a stop string has 1 to {limits.max_stop_chars} characters"
            )
    return strings


def _stop_token_ids(ids: list[int], card: ModelCard, limits: Limits) -> tuple[int, ...]:
    if len(ids) > limits.max_stop_token_ids:
        raise invalid("stop_token_ids", f"{len(ids)} ids are not allowed; at most {limits.max_stop_token_ids}")
    check_token_ids("stop_token_ids", ids, card)
    return tuple(ids)
