"""One choice of an answer while it is generated: what came, and what usage it makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shared.messages.gateway import PositionLogprobs
from shared.messages.generation import FinishReason


@dataclass(slots=True)
class ChoiceState:
    """Owns one choice's share of the answer."""

    index: int
    prompt: int
    """Which of the request's prompts it continues."""
    echo: str = ""
    """Text of the prompt, where the client wants it ahead of the answer's."""
    begun: bool = False
    """In a stream: whether its first chunk was made."""
    tokens: int = 0
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_at: float | None = None
    last_at: float | None = None
    """When its newest tokens came."""
    pieces: list[str] = field(default_factory=list)
    """Text; collected only where the answer is one body."""
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    """In a stream: those not sent yet."""
    offset: int = 0
    """Characters before the next token with log-probabilities."""


def usage(choices: list[ChoiceState]) -> dict[str, Any]:
    """Tokens of all choices; a prompt that several choices continue counts once."""
    first_of_prompt = {choice.prompt: choice for choice in reversed(choices)}
    prompt = sum(choice.prompt_tokens for choice in first_of_prompt.values())
    cached = sum(choice.cached_tokens for choice in first_of_prompt.values())
    completion = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
