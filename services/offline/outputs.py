"""What offline generation answers: vLLM's objects, filled from the gateway's own answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int | None
    """1 is the most likely token; None where it is not among those asked for."""
    decoded_token: str | None


Logprobs = list[dict[int, Logprob]]
"""For each position, by token id."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: Logprobs | None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt and all that was generated for it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    """Of the prompt, those that did not have to be computed."""
    finished: bool = True


def tokens_with_logprobs(answer: dict[str, Any]) -> set[int]:
    """The ids whose text `request_output` will want to know."""
    shown = [choice["logprobs"] for choice in answer["choices"] if choice["logprobs"] is not None]
    chosen = {_id(token) for columns in shown for token in columns["tokens"]}
    return chosen | {_id(token) for columns in shown for top in columns["top_logprobs"] for token in top or ()}


def request_output(answer: dict[str, Any], prompt: str | None, texts: Mapping[int, str], most: int) -> RequestOutput:
    """From the body of an answer that holds token ids; `texts` of tokens by id; `most` likely tokens were asked for."""
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    return RequestOutput(
        request_id=answer["id"],
        prompt=prompt,
        prompt_token_ids=choices[0]["prompt_token_ids"],
        prompt_logprobs=_prompt_logprobs(choices[0].get("prompt_logprobs")),
        outputs=[_choice(choice, texts, most) for choice in choices],
        num_cached_tokens=answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


def _choice(choice: dict[str, Any], texts: Mapping[int, str], most: int) -> CompletionOutput:
    return CompletionOutput(
        index=choice["index"],
        text=choice["text"],
        token_ids=choice["token_ids"],
        finish_reason=choice["finish_reason"],
        stop_reason=choice["stop_reason"],
        logprobs=_logprobs(choice["logprobs"], texts, most),
    )


def _logprobs(shown: dict[str, Any] | None, texts: Mapping[int, str], most: int) -> Logprobs | None:
    """The columns of a completion whose tokens are shown as `token_id:N`."""
    if shown is None:
        return None
    columns = zip(shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True)
    return [_position(_id(token), logprob, top or {}, texts, most) for token, logprob, top in columns]


def _position(
    chosen: int, logprob: float, top: dict[str, float], texts: Mapping[int, str], most: int
) -> dict[int, Logprob]:
    """The chosen token first. It is among `top` whether or not it is one of the most likely, and then comes last."""
    ranked = sorted(((_id(token), each) for token, each in top.items()), key=lambda pair: -pair[1])
    shown = {
        token: Logprob(each, rank if rank <= most else None, texts.get(token))
        for rank, (token, each) in enumerate(ranked, 1)
    }
    return {chosen: shown.pop(chosen, Logprob(logprob, None, texts.get(chosen))), **shown}


def _id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


def _prompt_logprobs(shown: list[dict[str, Any] | None] | None) -> list[dict[int, Logprob] | None] | None:
    if shown is None:
        return None
    return [
        None
        if position is None
        else {
            int(token): Logprob(each["logprob"], each.get("rank"), each.get("decoded_token"))
            for token, each in position.items()
        }
        for position in shown
    ]
