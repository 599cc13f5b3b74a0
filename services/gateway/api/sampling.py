"""Reads the fields that chats and completions share: sampling, stopping, log-probabilities and beam search."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import msgspec

from services.gateway.api.errors import abbreviated, check_packable, invalid, not_allowed
from services.gateway.api.fields.generation import CommonFields
from services.gateway.api.generation import (
    BeamSearchParams,
    GenerationRequest,
    RequestLimits,
    ResponseOptions,
    check_resumable,
    check_token_ids,
    choose_alias,
    choose_lora,
    stream_options,
)
from services.gateway.api.vllm.kv_transfer import FIELD, NO_TRANSFER, read_kv_transfer
from shared.messages.generation import SamplingOptions, StopConditions
from shared.messages.model_card import ModelCard, SamplingDefaults
from shared.messages.tokenizer import Prompt

MIN_TEMPERATURE = 0.01
"""Between 0 and this, division overflows; vLLM raises such values to this one too."""

MAX_EXTRA_ARGS_BYTES = 16 * 2**10
"""Size of the arguments of logits processors: they travel with the request and its plan."""

_NEUTRAL_IN_BEAM_SEARCH = {
    "temperature": (0.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
}
"""Values without effect. Any other would have to be ignored, as hypotheses are ranked by the model's probabilities."""
_EXCLUDED_BY_BEAM_SEARCH = (
    *("logit_bias", "bad_words", "allowed_token_ids", "logprob_token_ids", "prompt_logprobs", "thinking_token_budget"),
    *("vllm_xargs", "stop", "stop_token_ids", "stream", "echo", "response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "return_weight_versions"),
)


class LogprobsRequest(NamedTuple):
    """Which log-probabilities the client wants."""

    most_likely: int | None = None
    """How many most likely tokens beside the sampled one; None: no log-probabilities."""
    token_ids: tuple[int, ...] | None = None
    """Report these tokens instead of the most likely ones."""
    of_prompt: int | None = None
    """How many most likely tokens to report for each token of the prompt; None: no log-probabilities of the prompt."""


def generation_request(
    fields: CommonFields,
    card: ModelCard,
    limits: RequestLimits,
    *,
    prompts: tuple[Prompt, ...],
    max_tokens: int | None,
    logprobs: LogprobsRequest,
    echo_logprobs: int | None = None,
    role: str = "assistant",
    **own: Any,
) -> GenerationRequest:
    """Returns the request that `fields` make with what the endpoint has read itself: `prompts`, log-probabilities, who
    speaks, and in `own` further fields of a GenerationRequest. Raises RequestError 400."""
    keep = fields.truncate_prompt_tokens
    defaults = card.sampling if card.sampling is not None and not fields.use_beam_search else SamplingDefaults()
    if defaults.max_tokens is not None:
        max_tokens = min(defaults.max_tokens, defaults.max_tokens if max_tokens is None else max_tokens)
    generation = GenerationRequest(
        model=card,
        lora=choose_lora(fields.model, card),
        alias=choose_alias(fields.model, card),
        prompts=prompts,
        n=fields.n or 1,
        seed=fields.seed,
        sampling=sampling_params(fields, logprobs, card, limits, defaults),
        stopping=stop_params(fields, max_tokens, card, limits),
        stream=stream_options(fields, force_usage=limits.force_usage)
        if fields.stream or fields.stream_options
        else None,
        response_options=ResponseOptions(
            logprobs=logprobs.most_likely is not None,
            prompt_logprobs=None if fields.prompt_logprobs is None else logprobs.of_prompt,
            echo_logprobs=echo_logprobs,
            prompt_text=bool(fields.return_prompt_text),
            token_ids=bool(fields.return_token_ids),
            tokens_as_ids=bool(fields.return_tokens_as_token_ids),
            metrics=bool(fields.return_metrics),
            weight_versions=bool(fields.return_weight_versions),
            role=role,
        ),
        bad_words=bad_words(fields.bad_words, limits) if fields.bad_words else (),
        truncate_prompt_tokens=None if keep is None else kept_prompt_tokens(keep, max_tokens, card),
        truncation_side=fields.truncation_side or "left",
        request_id=fields.request_id,
        skip_special_tokens=fields.skip_special_tokens is not False,
        priority=fields.priority or 0,
        stream_interval=fields.stream_interval or limits.stream_interval,
        cache_salt=fields.cache_salt,
        prefix_caching=limits.allow_prefix_caching and fields.enable_prefix_caching is not False,
        kv_transfer=read_kv_transfer(fields.kv_transfer_params),
        **own,
    )
    if generation.kv_transfer != NO_TRANSFER:
        _check_kv_transfer(generation)
    if generation.stream is not None and generation.stream.resumable:
        check_resumable(generation)
    return generation


def _check_kv_transfer(generation: GenerationRequest) -> None:
    """Raises RequestError 400 for what a hand-over that the client conducts cannot have."""
    if not generation.prefix_caching:
        raise invalid(FIELD, "not allowed without prefix caching: blocks are found by their hashes")
    if generation.beam_search is not None:
        raise invalid(FIELD, "not allowed together with use_beam_search")
    if not generation.kv_transfer.keep:
        return
    if generation.sequences > 1:
        raise invalid(FIELD, f"do_remote_decode is allowed for one choice only, not {generation.sequences}")
    if generation.stream is not None:
        raise invalid(FIELD, "do_remote_decode is not allowed in a stream: the whole answer has the params")


def sampling_params(
    fields: CommonFields,
    logprobs: LogprobsRequest,
    card: ModelCard,
    limits: RequestLimits,
    defaults: SamplingDefaults,
) -> SamplingOptions:
    """Returns parameters without the seed, which differs by choice. Raises RequestError 400."""
    temperature = _first(fields.temperature, defaults.temperature, 1.0)
    if 0 < temperature < MIN_TEMPERATURE:
        temperature = MIN_TEMPERATURE
    return SamplingOptions(
        seed=0,
        temperature=temperature,
        top_p=_first(fields.top_p, defaults.top_p, 1.0),
        top_k=int(max(0, _first(fields.top_k, defaults.top_k, 0))),
        min_p=_first(fields.min_p, defaults.min_p, 0.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_first(fields.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=_logit_bias(fields.logit_bias, card, limits) if fields.logit_bias else (),
        logprobs=logprobs.most_likely,
        allowed_token_ids=(
            None if fields.allowed_token_ids is None else _allowed_token_ids(fields.allowed_token_ids, card)
        ),
        logprob_token_ids=logprobs.token_ids,
        prompt_logprobs=logprobs.of_prompt,
        thinking_budget=None if fields.thinking_token_budget == -1 else fields.thinking_token_budget,
        extra_args=_extra_args(fields.vllm_xargs, card) if fields.vllm_xargs else b"",
    )


def _first(asked: float | None, default: float | None, otherwise: float) -> float:
    """What the request asks for, or else the model's default, or else OpenAI's."""
    if asked is not None:
        return asked
    return otherwise if default is None else default


def _extra_args(given: dict[str, Any], card: ModelCard) -> bytes:
    """Whether the values are allowed, only the processors know."""
    for name in given:
        if name not in card.extra_args:
            known = f"one of {', '.join(card.extra_args)} is" if card.extra_args else "no logits processor is loaded"
            raise not_allowed("vllm_xargs", name, known)
    check_packable("vllm_xargs", given)
    packed = msgspec.json.encode(given)
    if len(packed) > MAX_EXTRA_ARGS_BYTES:
        raise invalid("vllm_xargs", f"{len(packed)} bytes are not allowed; at most {MAX_EXTRA_ARGS_BYTES}")
    return packed


def _allowed_token_ids(ids: list[int], card: ModelCard) -> tuple[int, ...]:
    if not 1 <= len(ids) <= card.vocab_size:
        raise invalid("allowed_token_ids", f"{len(ids)} ids are not allowed; 1 to {card.vocab_size} are")
    check_token_ids("allowed_token_ids", ids, card)
    return tuple(dict.fromkeys(ids))


def _logit_bias(biases: dict[str, float], card: ModelCard, limits: RequestLimits) -> tuple[tuple[int, float], ...]:
    if len(biases) > limits.max_logit_bias:
        raise invalid("logit_bias", f"{len(biases)} entries are not allowed; at most {limits.max_logit_bias}")
    wrong = [abbreviated(key, 20) for key in biases if not _is_token_id(key, card)]
    if wrong:
        named = f"key {wrong[0]} is" if len(wrong) == 1 else f"keys {', '.join(wrong)} are"
        raise invalid("logit_bias", f"{named} not allowed; keys are token ids below {card.vocab_size}")
    if infinite := [bias for bias in biases.values() if not math.isfinite(bias)]:
        raise not_allowed("logit_bias", infinite[0], "values are finite numbers")
    return tuple((int(key), min(100.0, max(-100.0, bias))) for key, bias in biases.items())


def _is_token_id(key: str, card: ModelCard) -> bool:
    return key.isascii() and key.isdecimal() and len(key) < 12 and int(key) < card.vocab_size


def stop_params(fields: CommonFields, max_tokens: int | None, card: ModelCard, limits: RequestLimits) -> StopConditions:
    """Returns when a sequence ends. Raises RequestError 400."""
    min_tokens = fields.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise not_allowed("min_tokens", min_tokens, f"it must be at most max_tokens ({max_tokens})")
    if min_tokens > card.max_model_len:
        raise not_allowed("min_tokens", min_tokens, f"it must be at most the model's context ({card.max_model_len})")
    ids = fields.stop_token_ids or []
    if ids:
        if len(ids) > limits.max_stop_token_ids:
            raise invalid("stop_token_ids", f"{len(ids)} ids are not allowed; at most {limits.max_stop_token_ids}")
        check_token_ids("stop_token_ids", ids, card)
    return StopConditions(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=() if fields.stop is None else _stop_strings(fields.stop, limits),
        stop_token_ids=tuple(ids),
        ignore_eos=bool(fields.ignore_eos),
        include_stop=bool(fields.include_stop_str_in_output),
    )


def _stop_strings(stop: str | list[str], limits: RequestLimits) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > limits.max_stop:
        raise invalid("stop", f"{len(strings)} stop strings are not allowed; at most {limits.max_stop}")
    for string in strings:
        if not 1 <= len(string) <= limits.max_stop_chars:
            raise not_allowed("stop", string, f"a stop string has 1 to {limits.max_stop_chars} characters")
    return strings


def bad_words(words: list[str], limits: RequestLimits) -> tuple[str, ...]:
    """Checks `bad_words`, which the tokenizer turns into token ids. Raises RequestError 400."""
    if len(words) > limits.max_bad_words:
        raise invalid("bad_words", f"{len(words)} words are not allowed; at most {limits.max_bad_words}")
    for word in words:
        if not word.strip() or len(word) > limits.max_bad_word_chars:
            raise not_allowed(
                "bad_words", word, f"a word has 1 to {limits.max_bad_word_chars} characters, and not only spaces"
            )
    return tuple(words)


def kept_prompt_tokens(given: int, max_tokens: int | None, card: ModelCard) -> int:
    """Returns how many of the prompt's tokens to keep; -1: as many as fit beside the output, or as an encoder takes.
    Raises RequestError."""
    encoder = card.encoder_decoder
    most = card.max_model_len if encoder is None else encoder.rows
    if given == -1:
        return max(1, most - (max_tokens or 1)) if encoder is None else most
    if not 1 <= given <= most:
        holds = "the context holds" if encoder is None else "the model's encoder takes"
        raise not_allowed("truncate_prompt_tokens", given, f"it must be 1 to {most}, or -1 for as many as {holds}")
    return given


def chat_logprobs_request(
    fields: CommonFields, logprobs: bool | None, top: int | None, card: ModelCard, limits: RequestLimits
) -> LogprobsRequest:
    """Reads a chat's `logprobs` and `top_logprobs`. Raises RequestError 400."""
    named = _logprob_token_ids(fields.logprob_token_ids, card, limits)
    of_prompt = None if fields.prompt_logprobs is None else _prompt_logprobs(fields, card, limits)
    if top is not None:
        top = _logprobs_count("top_logprobs", top, card, limits)
        if top and not logprobs:
            raise invalid("top_logprobs", "only allowed when logprobs is true")
    if named is not None and not logprobs:
        raise invalid("logprob_token_ids", "only allowed when logprobs is true")
    if not logprobs:
        return LogprobsRequest(of_prompt=of_prompt)
    return LogprobsRequest((top or 0) if named is None else 0, named, of_prompt)


def completion_logprobs_request(
    fields: CommonFields, logprobs: int | None, echo: bool, card: ModelCard, limits: RequestLimits
) -> LogprobsRequest:
    """Reads a completion's `logprobs`. With `echo` they include the prompt's, as in OpenAI's API. Raises
    RequestError."""
    named = _logprob_token_ids(fields.logprob_token_ids, card, limits)
    of_prompt = None if fields.prompt_logprobs is None else _prompt_logprobs(fields, card, limits)
    if logprobs is not None:
        logprobs = _logprobs_count("logprobs", logprobs, card, limits)
        if echo:
            of_prompt = max(logprobs, of_prompt or 0)
    elif named is not None:
        raise invalid("logprob_token_ids", "only allowed together with logprobs")
    return LogprobsRequest(logprobs if named is None else 0, named, of_prompt)


def _prompt_logprobs(fields: CommonFields, card: ModelCard, limits: RequestLimits) -> int:
    if fields.stream:
        raise invalid("prompt_logprobs", "not allowed when stream is true")
    return _logprobs_count("prompt_logprobs", fields.prompt_logprobs or 0, card, limits)


def _logprobs_count(field: str, given: int, card: ModelCard, limits: RequestLimits) -> int:
    """Checks the number of log-probabilities; -1 means the whole vocabulary, if that is within the limit."""
    count = card.vocab_size if given == -1 else given
    if not 0 <= count <= limits.max_logprobs:
        raise not_allowed(field, given, f"it must be 0 to {limits.max_logprobs}")
    return min(count, card.vocab_size)


def _logprob_token_ids(ids: list[int] | None, card: ModelCard, limits: RequestLimits) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not 1 <= len(ids) <= limits.max_logprob_token_ids:
        raise invalid("logprob_token_ids", f"{len(ids)} ids are not allowed; 1 to {limits.max_logprob_token_ids} are")
    check_token_ids("logprob_token_ids", ids, card)
    return tuple(dict.fromkeys(ids))


def beam_search_params(fields: CommonFields, limits: RequestLimits) -> BeamSearchParams | None:
    """Returns None where `use_beam_search` is not set. Raises RequestError 400 for fields that contradict it."""
    if not fields.use_beam_search:
        if fields.length_penalty not in (None, 1.0):
            raise invalid("length_penalty", "only allowed when use_beam_search is true")
        if fields.early_stopping:
            raise invalid("early_stopping", "only allowed when use_beam_search is true")
        return None
    if (fields.n or 1) > limits.max_beams:
        raise invalid("n", f"{fields.n} is not allowed with use_beam_search; at most {limits.max_beams} beams")
    for name, neutral in _NEUTRAL_IN_BEAM_SEARCH.items():
        value = getattr(fields, name)
        if value is not None and value not in neutral:
            raise invalid(name, f"{abbreviated(value)} is not allowed with use_beam_search; {neutral[0]:g} is")
    for name in _EXCLUDED_BY_BEAM_SEARCH:
        value = getattr(fields, name, None)
        given = value is not None and value is not False and value not in ("", [], {})
        if given and getattr(value, "type", "") != "text":
            raise invalid(name, "not allowed together with use_beam_search")
    return BeamSearchParams(
        length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
        early_stopping=False if fields.early_stopping is None else fields.early_stopping,
    )
