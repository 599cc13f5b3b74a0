"""Log-probabilities as chats and as completions show them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shared.messages.gateway import LogprobText, PositionLogprobs

LOWEST = -9999.0
"""JSON has no -Infinity; vLLM shows this instead."""


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def _chat_token(text: LogprobText) -> dict[str, Any]:
    return {"token": text.token, "logprob": _finite(text.logprob), "bytes": list(text.raw)}


def chat_logprobs(positions: Iterable[PositionLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    content = [
        {**_chat_token(position.chosen), "top_logprobs": [_chat_token(text) for text in position.top]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(positions: Iterable[PositionLogprobs], offset: int) -> tuple[dict[str, Any], int]:
    """`choices[].logprobs` of a completion whose first token lies at character `offset` of the text, and the
    offset behind the last token."""
    tokens: list[str] = []
    logprobs: list[float] = []
    top: list[dict[str, float]] = []
    offsets: list[int] = []
    for position in positions:
        chosen = position.chosen
        tokens.append(chosen.token)
        logprobs.append(_finite(chosen.logprob))
        # Different tokens may have the same text; the more likely one is shown, as it comes last here.
        likely = {text.token: _finite(text.logprob) for text in reversed(position.top)}
        top.append({chosen.token: _finite(chosen.logprob)} | dict(reversed(likely.items())))
        offsets.append(offset)
        offset += len(chosen.token)
    shown = {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": top}
    return shown, offset
