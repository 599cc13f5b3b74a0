"""Answers that are one JSON body."""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.answers.choice import ChoiceState, usage
from services.gateway.answers.heading import Heading
from services.gateway.answers.logprobs import (
    by_id,
    by_text,
    chat_logprobs,
    completion_columns,
    echoed_columns,
    joined,
    prompt_logprobs,
)
from services.gateway.api.job import Telling


def body(heading: Heading, choices: list[ChoiceState], telling: Telling) -> bytes:
    """The whole answer."""
    chat = heading.kind == "chat"
    _share_prompts(choices)
    shown = [_chat_choice(choice, telling) if chat else _completion_choice(choice, telling) for choice in choices]
    answer = {**heading.fields(chunk=False), "choices": shown, "usage": usage(choices)}
    if chat:
        answer |= _of_prompt(choices[0], telling)
    return msgspec.json.encode(answer)


def _share_prompts(choices: list[ChoiceState]) -> None:
    """One choice of each prompt has learnt the log-probabilities of its tokens."""
    known = {choice.prompt: choice.prompt_logprobs for choice in choices if choice.prompt_logprobs}
    for choice in choices:
        choice.prompt_logprobs = known.get(choice.prompt, choice.prompt_logprobs)


def _chat_choice(choice: ChoiceState, telling: Telling) -> dict[str, Any]:
    naming = by_id if telling.tokens_as_ids else by_text
    return {
        "index": choice.index,
        "message": _message(choice),
        "logprobs": chat_logprobs(choice.logprobs, naming) if telling.logprobs else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        **({"token_ids": choice.token_ids} if telling.token_ids else {}),
    }


def _message(choice: ChoiceState) -> dict[str, Any]:
    if choice.speech is not None:
        return choice.speech.message()
    return {"role": "assistant", "content": "".join(choice.pieces), "refusal": None}


def _completion_choice(choice: ChoiceState, telling: Telling) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.echo + "".join(choice.pieces),
        "logprobs": _completion_logprobs(choice, telling) if telling.logprobs else None,
        "finish_reason": choice.finish,
        "stop_reason": choice.stop_reason,
        **({"token_ids": choice.token_ids} if telling.token_ids else {}),
        **_of_prompt(choice, telling),
    }


def _completion_logprobs(choice: ChoiceState, telling: Telling) -> dict[str, Any]:
    naming = by_id if telling.tokens_as_ids else by_text
    columns, _ = completion_columns(choice.logprobs, len(choice.echo), naming)
    if telling.echo_logprobs is not None:
        columns = joined(echoed_columns(choice, naming, telling.echo_logprobs), columns)
    return columns.shown()


def _of_prompt(choice: ChoiceState, telling: Telling) -> dict[str, Any]:
    """What vLLM tells of the prompt: with each choice of a completion, with a chat once."""
    told: dict[str, Any] = {}
    if telling.prompt_logprobs is not None:
        told["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, telling.prompt_logprobs)
    if telling.token_ids:
        told["prompt_token_ids"] = choice.prompt_ids
    return told
