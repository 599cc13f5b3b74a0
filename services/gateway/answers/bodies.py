"""Answers that are one JSON body."""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.answers.choice import ChoiceState, usage
from services.gateway.answers.heading import Heading
from services.gateway.answers.logprobs import chat_logprobs, completion_logprobs


def body(heading: Heading, choices: list[ChoiceState], logprobs: bool) -> bytes:
    """The whole answer."""
    render = _chat_choice if heading.kind == "chat" else _completion_choice
    shown = [render(choice, logprobs) for choice in choices]
    return msgspec.json.encode({**heading.fields(chunk=False), "choices": shown, "usage": usage(choices)})


def _chat_choice(choice: ChoiceState, logprobs: bool) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": "".join(choice.pieces), "refusal": None},
        "logprobs": chat_logprobs(choice.logprobs) if logprobs else None,
        "finish_reason": choice.finish,
        "stop_reason": choice.stop_reason,
    }


def _completion_choice(choice: ChoiceState, logprobs: bool) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.echo + "".join(choice.pieces),
        "logprobs": completion_logprobs(choice.logprobs, len(choice.echo))[0] if logprobs else None,
        "finish_reason": choice.finish,
        "stop_reason": choice.stop_reason,
    }
