"""The fields that chat and completions share, their ranges (vLLM's), and what they come to for the engine."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from msgspec import Struct

from services.gateway.api.errors import ApiError, invalid, shown, unsupported
from services.gateway.api.job import EarlyStopping, Limits, StreamOptions
from services.gateway.api.structured import ResponseFormat, StructuredOutputs
from shared.ids import ModelName
from shared.messages.lifecycle import ModelCard

INT64 = 2**63


class Range(NamedTuple):
    low: float | None
    high: float | None
    low_allowed: bool = True

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        if isinstance(value, float) and not math.isfinite(value):
            return False
        above = self.low is None or value > self.low or (self.low_allowed and value == self.low)
        return above and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        low = "" if self.low is None else f"{'at least' if self.low_allowed else 'above'} {_written(self.low)}"
        high = "" if self.high is None else f"at most {_written(self.high)}"
        return " and ".join(part for part in (low, high) if part)


def _written(bound: float) -> str:
    """Nobody reads a power of two in its digits."""
    powers = {2**31 - 1: "2^31 - 1", -(2**31): "-2^31", INT64 - 1: "2^63 - 1", -INT64: "-2^63"}
    return powers.get(int(bound), f"{bound:g}")


RANGES = {
    "n": Range(1, 128),
    "temperature": Range(0, None),
    "top_p": Range(0, 1, low_allowed=False),
    "top_k": Range(-1, INT64 - 1),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, None, low_allowed=False),
    "max_tokens": Range(1, INT64 - 1),
    "max_completion_tokens": Range(1, INT64 - 1),
    "min_tokens": Range(0, INT64 - 1),
    "seed": Range(-INT64, INT64 - 1),
    "priority": Range(-(2**31), 2**31 - 1),
    "thinking_token_budget": Range(0, INT64 - 1),
    "length_penalty": Range(-10, 10),
}


class StreamOptionFields(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonFields(Struct, kw_only=True):
    """JSON of both endpoints. Unknown fields are ignored; null means the default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptionFields | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    thinking_token_budget: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    # Asked for by some, offered by nobody here yet: refused rather than ignored, as the answer would be another.
    prompt_embeds: Any = None
    logits_processors: Any = None
    guided_whitespace_pattern: Any = None


_REFUSED = {
    "prompt_embeds": "a prompt as embeddings",
    "logits_processors": "a logits processor of the client's",
    "guided_whitespace_pattern": "a pattern for white space",
}


def check_ranges(fields: CommonFields, *, but: str = "") -> None:
    """Raises ApiError 400 for a number out of its range, `but` a field that has another one."""
    for name, allowed in RANGES.items():
        value = getattr(fields, name, None)
        if value is not None and name != but and value not in allowed:
            raise invalid(name, f"{shown(value)} is not allowed; it must be {allowed}")


def refuse_unsupported(fields: CommonFields) -> None:
    for name, what in _REFUSED.items():
        if getattr(fields, name) is not None:
            raise unsupported(name, what)
    if fields.skip_special_tokens is False and fields.spaces_between_special_tokens is False:
        raise unsupported("spaces_between_special_tokens", "taking spaces away from shown special tokens")
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise invalid("best_of", f"{fields.best_of} is not allowed; only the value of n ({fields.n or 1}) is")


def stream_options(fields: CommonFields) -> StreamOptions | None:
    options = fields.stream_options
    if not fields.stream:
        if options is not None:
            raise invalid("stream_options", "only allowed when stream is true")
        return None
    usage = options is not None and bool(options.include_usage)
    return StreamOptions(usage, usage and options is not None and bool(options.continuous_usage_stats))


def check_token_ids(name: str, ids: list[int], card: ModelCard) -> None:
    """Raises ApiError 400 for an id that is not in the vocabulary."""
    for place, token in enumerate(ids):
        if not 0 <= token < card.vocab_size:
            raise invalid(name, f"{token} at {place} is not allowed; token ids are 0 to {card.vocab_size - 1}")


def check_count(prompts: int, n: int, limits: Limits) -> None:
    if prompts * n > limits.max_choices:
        what = f"{prompts} prompts times n = {n}" if prompts > 1 else f"n = {n}"
        raise invalid("n", f"{what} is not allowed; at most {limits.max_choices} choices in one request")


def checked_salt(fields: CommonFields) -> str | None:
    if fields.cache_salt is not None and not 1 <= len(fields.cache_salt) <= 256:
        raise invalid("cache_salt", "it must have 1 to 256 characters")
    return fields.cache_salt


def choose_model(name: str | None, cards: list[ModelCard]) -> ModelCard:
    """The model a request is for. Raises ApiError 404 for an unknown one, 503 while none is known."""
    if not cards:
        raise ApiError(503, "no engine has announced its model yet; the stack is starting", retry_after=1.0)
    if name is None:
        if len(cards) == 1:
            return cards[0]
        raise invalid("model", "this field is required where several models are served")
    for card in cards:
        if card.name == ModelName(name):
            return card
    raise ApiError(404, f"The model `{shown(name)[1:-1]}` does not exist.", param="model", code="model_not_found")
