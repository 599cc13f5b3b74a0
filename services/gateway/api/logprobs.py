"""Which log-probabilities a request asks for, checked: vLLM's rules for chats, completions and prompts."""

from __future__ import annotations

from typing import NamedTuple

from services.gateway.api.errors import invalid
from services.gateway.api.fields import CommonFields, check_token_ids
from services.gateway.api.job import Limits
from shared.messages.lifecycle import ModelCard


class AskedLogprobs(NamedTuple):
    most_likely: int | None = None
    """Beside the drawn token's; None: no log-probabilities."""
    token_ids: tuple[int, ...] | None = None
    """Those of these tokens, instead of the most likely ones'."""
    of_prompt: int | None = None


def chat_logprobs_asked(
    fields: CommonFields, logprobs: bool | None, top: int | None, card: ModelCard, limits: Limits
) -> AskedLogprobs:
    """Raises ApiError 400."""
    named = _token_ids(fields, "top_logprobs", top, card, limits)
    of_prompt = prompt_logprobs_asked(fields, card, limits)
    if top is not None:
        top = _count("top_logprobs", top, card, limits)
        if top and not logprobs:
            raise invalid("top_logprobs", "only allowed when logprobs is true")
    return AskedLogprobs((top or 0) if logprobs or named is not None else None, named, of_prompt)


def completion_logprobs_asked(
    fields: CommonFields, logprobs: int | None, echo: bool, card: ModelCard, limits: Limits
) -> AskedLogprobs:
    """With `echo` those of the prompt, too, as OpenAI's legacy API has it. Raises ApiError 400."""
    named = _token_ids(fields, "logprobs", logprobs, card, limits)
    of_prompt = prompt_logprobs_asked(fields, card, limits)
    if logprobs is not None:
        logprobs = _count("logprobs", logprobs, card, limits)
        if echo:
            of_prompt = max(logprobs, of_prompt or 0)
    elif named is not None:
        logprobs = 0
    return AskedLogprobs(logprobs, named, of_prompt)


def prompt_logprobs_asked(fields: CommonFields, card: ModelCard, limits: Limits) -> int | None:
    if fields.prompt_logprobs is None:
        return None
    if fields.stream:
        raise invalid("prompt_logprobs", "not allowed when stream is true")
    return _count("prompt_logprobs", fields.prompt_logprobs, card, limits)


def _count(field: str, given: int, card: ModelCard, limits: Limits) -> int:
    """-1 stands for the whole vocabulary, where that is not too many."""
    wanted = card.vocab_size if given == -1 else given
    if not 0 <= wanted <= limits.max_logprobs:
        raise invalid(field, f"{given} is not allowed; it must be 0 to {limits.max_logprobs}")
    return min(wanted, card.vocab_size)


def _token_ids(
    fields: CommonFields, beside: str, most_likely: int | None, card: ModelCard, limits: Limits
) -> tuple[int, ...] | None:
    ids = fields.logprob_token_ids
    if ids is None:
        return None
    if most_likely:
        raise invalid("logprob_token_ids", f"not allowed together with {beside} ({most_likely}); they take their place")
    if not 1 <= len(ids) <= limits.max_logprob_token_ids:
        raise invalid("logprob_token_ids", f"{len(ids)} ids are not allowed; 1 to {limits.max_logprob_token_ids} are")
    check_token_ids("logprob_token_ids", ids, card)
    return tuple(dict.fromkeys(ids))
