"""Answers in the shape of SGLang's `/generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

from services.gateway.api.logprobs import MIN_LOGPROB
from services.gateway.api.response import ChoiceState, ResponseHeader
from services.gateway.api.sglang.request import SglangAnswerOptions
from services.gateway.api.vllm.answer_fields import WEIGHTS
from shared.messages.gateway import LogprobText, PositionLogprobs

JsonArray = Callable[[Iterable[Any]], Any]
"""A list, or one that is made as it is encoded."""


def answer(
    choice: ChoiceState,
    header: ResponseHeader,
    options: SglangAnswerOptions,
    *,
    began: float,
    now: float,
    array: JsonArray = list,
) -> dict[str, Any]:
    """Returns a choice's answer as far as it has arrived. `began`, `now`: by the response's clock. `array`: what
    log-probabilities are listed in."""
    meta: dict[str, Any] = {
        "id": identity(choice, header, options),
        "finish_reason": _finish_reason(choice),
        "prompt_tokens": choice.prompt_tokens,
        "weight_version": WEIGHTS,
        "completion_tokens": choice.tokens,
        "cached_tokens": choice.cached_tokens,
        "e2e_latency": now - began,
    }
    if options.logprobs:
        meta |= {name: array(listed) for name, listed in _logprobs(choice, options)}
    return {"text": "".join(choice.texts), "output_ids": choice.token_ids, "meta_info": meta}


def identity(choice: ChoiceState, header: ResponseHeader, options: SglangAnswerOptions) -> str:
    """The id of a choice: the client's, or the response's, with a number where there are several."""
    given = options.rid or header.id
    return f"{given}_{choice.index}" if options.batch else given


def _finish_reason(choice: ChoiceState) -> dict[str, Any] | None:
    match choice.finish:
        case None:
            return None
        case "stop":
            matched = {} if choice.stop_reason is None else {"matched": choice.stop_reason}
            return {"type": "stop", **matched}
        case "length":
            return {"type": "length", "length": choice.tokens}
        case "abort":
            return {"type": "abort", "message": "Aborted"}


def _logprobs(choice: ChoiceState, options: SglangAnswerOptions) -> Iterator[tuple[str, Iterable[Any]]]:
    """The fields with log-probabilities."""
    yield "output_token_logprobs", _chosen(choice.logprobs, options)
    if options.top:
        yield "output_top_logprobs", _top(choice.logprobs, options)
    if (begin := options.prompt_from) is not None:
        scored: Iterable[Any] = chain([_first(choice, options)], _chosen(choice.prompt_logprobs, options))
        yield "input_token_logprobs", islice(scored, begin, None)
        if options.top:
            likely: Iterable[Any] = chain([None], _top(choice.prompt_logprobs, options))
            yield "input_top_logprobs", islice(likely, begin, None)


def _chosen(positions: Iterable[PositionLogprobs], options: SglangAnswerOptions) -> Iterator[list[Any]]:
    return (_token(position.chosen, options) for position in positions)


def _top(positions: Iterable[PositionLogprobs], options: SglangAnswerOptions) -> Iterator[list[list[Any]]]:
    return ([_token(text, options) for text in position.top[: options.top]] for position in positions)


def _token(text: LogprobText, options: SglangAnswerOptions) -> list[Any]:
    return [max(text.logprob, MIN_LOGPROB), text.token_id, text.token if options.texts else None]


def _first(choice: ChoiceState, options: SglangAnswerOptions) -> list[Any]:
    """Nothing comes before a prompt's first token, so that it has no log-probability."""
    token = choice.prompt_ids[0] if choice.prompt_ids else None
    return [None, token, choice.echo_first_token if options.texts else None]
