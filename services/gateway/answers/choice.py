"""One choice of an answer while it is generated: what came, and what usage it makes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from services.gateway.answers.speech import Speech
from shared.messages.gateway import PositionLogprobs, PromptPart
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
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from the second on, as far as they came."""
    echoed_first: str | None = None
    """Text of the prompt's first token, where the prompt's log-probabilities are still to be echoed."""
    prompt_ids: list[int] | None = None
    """Where the client wants to know them. In a stream: until it has been told."""
    token_ids: list[int] = field(default_factory=list)
    """Output tokens, where the client wants to know them. In a stream: those not sent yet."""
    speech: Speech | None = None
    """Takes a chat's output apart, where it is more than text."""
    only_echo: bool = False
    """The output is of no interest."""

    @property
    def finish_reason(self) -> str | None:
        """As clients are told."""
        return self.finish if self.finish is None or self.speech is None else self.speech.finish(self.finish)

    def scored(self, part: PromptPart) -> None:
        """What comes a second time, after a preemption or with another attempt, is known."""
        known = 1 + len(self.prompt_logprobs) - part.position
        assert known >= 0, "the supervision lets no gap through"
        self.prompt_logprobs.extend(part.logprobs[known:])


def usage(choices: list[ChoiceState]) -> dict[str, Any]:
    """Tokens of all choices. A prompt that several choices continue counts once, and as cached is what none of them had
    to compute: those that came later found there what the first one did."""
    prompt = sum({choice.prompt: choice.prompt_tokens for choice in choices}.values())
    cached = sum(cached_of_prompts(choices))
    completion = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def cached_of_prompts(choices: list[ChoiceState]) -> Iterable[int]:
    """For each prompt, its tokens that were in no choice computed."""
    least: dict[int, int] = {}
    for choice in choices:
        least[choice.prompt] = min(choice.cached_tokens, least.get(choice.prompt, choice.cached_tokens))
    return least.values()
