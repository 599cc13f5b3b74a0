"""Answers in the shape of vLLM's `/inference/v1/generate`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from services.gateway.api.encoding.lazy_json import LazyArray
from services.gateway.api.logprobs import MIN_LOGPROB, chat_logprobs, prompt_logprobs
from services.gateway.api.response import ChoiceState, ResponseHeader, usage
from services.gateway.api.tokens.request import TokensAnswerOptions
from services.gateway.api.vllm.answer_fields import weight_versions
from shared.messages.gateway import Delta, LogprobText, PositionLogprobs

UNUSED_OF_CHOICE = dict.fromkeys(("routed_experts", "sampling_mask"))
UNUSED = dict.fromkeys(("prompt_token_id_logprobs", "mm_placeholders", "metrics", "ec_transfer_params"))
"""Fields of vLLM's answers that are always null here."""


def answer(
    header: ResponseHeader,
    choices: list[ChoiceState],
    options: TokensAnswerOptions,
    scored: int | None,
    transfer: dict[str, Any] | None,
) -> dict[str, Any]:
    """Returns a body. `scored`: how many tokens to show at each position of the prompt; `transfer`: its
    `kv_transfer_params`."""
    first = choices[0]
    return {
        "request_id": header.shown_id or header.id,
        "model": header.model,
        "created": header.created,
        "usage": usage(choices),
        "prompt_logprobs": None if scored is None else prompt_logprobs(first.prompt_logprobs, scored),
        "prompt_token_ids": first.prompt_ids if options.prompt_ids else None,
        "kv_transfer_params": transfer,
        **UNUSED,
        **_mode(options),
        "choices": LazyArray(
            _choice(each, options, each.token_ids, "".join(each.texts), LazyArray(_positions(each.logprobs, options)))
            for each in choices
        ),
    }


def chunk(
    choice: ChoiceState, delta: Delta, header: ResponseHeader, options: TokensAnswerOptions, *, with_usage: bool
) -> dict[str, Any]:
    """Returns an event of new output; the first one of a stream has the prompt's ids, where they are wanted."""
    body: dict[str, Any] = {
        "request_id": header.shown_id or header.id,
        "usage": usage([choice]) if with_usage else None,
        **_mode(options),
        "choices": [
            _choice(choice, options, list(delta.tokens), delta.text, list(_positions(delta.logprobs or (), options)))
        ],
    }
    if options.prompt_ids and choice.prompt_ids is not None:
        body["prompt_token_ids"] = choice.prompt_ids
    return body


def last_chunk(choices: list[ChoiceState], header: ResponseHeader, options: TokensAnswerOptions) -> dict[str, Any]:
    """Returns the event with the usage."""
    return {"request_id": header.shown_id or header.id, "usage": usage(choices), **_mode(options), "choices": []}


def _mode(options: TokensAnswerOptions) -> dict[str, str]:
    return {"output_mode": "text" if options.text else "tokens"}


def _choice(
    choice: ChoiceState,
    options: TokensAnswerOptions,
    tokens: list[int],
    text: str,
    logprobs: list[dict[str, Any]] | LazyArray,
) -> dict[str, Any]:
    ended = choice.finish is not None
    return {
        "index": choice.index,
        "finish_reason": choice.finish,
        "stop_reason": choice.stop_reason,
        "token_ids": tokens,
        "weight_versions": weight_versions(choice.tokens) if ended else None,
        **UNUSED_OF_CHOICE,
        **({"text": text} if options.text else {}),
        "logprobs": None if options.logprobs is None else {"content": logprobs},
    }


def _positions(positions: Iterable[PositionLogprobs], options: TokensAnswerOptions) -> Iterator[dict[str, Any]]:
    """As vLLM has it, the sampled token is the first of `top_logprobs`, and counts among them."""
    for position in positions:
        chosen = position.chosen
        ranks = {text.token_id: i for i, text in enumerate(position.top, start=1)} if options.ranked else {}
        likely = [chosen, *(text for text in position.top if text.token_id != chosen.token_id)]
        top = likely[: max(options.logprobs or 0, 1)]
        if options.text:
            yield from chat_logprobs([PositionLogprobs(chosen, tuple(top))])["content"]
        else:
            ranked = [_token(text, ranks) for text in top]
            yield {**ranked[0], "top_logprobs": ranked}


def _token(text: LogprobText, ranks: dict[int, int]) -> dict[str, Any]:
    """The rank of a token that is not among the most likely ones is not known here."""
    return {
        "token_id": text.token_id,
        "logprob": max(text.logprob, MIN_LOGPROB),
        "rank": ranks.get(text.token_id),
    }
