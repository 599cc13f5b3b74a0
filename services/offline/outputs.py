"""The results of offline generation: vLLM's classes, filled from the gateway's JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position."""

    logprob: float
    rank: int | None
    """1 is the most likely token; None if the token is not among the requested most likely ones."""
    decoded_token: str | None


Logprobs = list[dict[int, Logprob]]
"""For each position, by token id."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output of a prompt, with vLLM's field names."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: Logprobs | None

    def finished(self) -> bool:
        """Returns whether the choice has ended, which it always has."""
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
    """Tokens of the prompt that were found in the cache."""
    finished: bool = True


def tokens_with_logprobs(answer: dict[str, Any]) -> set[int]:
    """Returns the token ids whose text `request_output` needs."""
    positions = [
        position for choice in answer["choices"] if choice["logprobs"] for position in _positions(choice["logprobs"])
    ]
    return {_id(token) for chosen, _, likely in positions for token in (chosen, *likely)}


def request_output(answer: dict[str, Any], prompt: str | None, texts: Mapping[int, str], top: int) -> RequestOutput:
    """Returns the output for one prompt, from a chat's or a completion's body with token ids and texts of prompts.
    `prompt`: its text, where that was given; `texts`: of tokens, by id; `top`: how many most likely tokens were
    requested at each position."""
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    about = {**answer, **choices[0]}  # a completion describes the prompt in each choice, a chat beside them
    scored = about.get("prompt_logprobs")
    return RequestOutput(
        request_id=answer["id"],
        prompt=about["prompt_text"] if prompt is None else prompt,
        prompt_token_ids=about["prompt_token_ids"],
        prompt_logprobs=None if scored is None else _prompt_logprobs(scored),
        outputs=[
            CompletionOutput(
                index=choice["index"],
                text=choice["message"]["content"] if "message" in choice else choice["text"],
                token_ids=choice["token_ids"],
                finish_reason=choice["finish_reason"],
                stop_reason=choice["stop_reason"],
                logprobs=choice["logprobs"]
                and [_position(*position, texts, top) for position in _positions(choice["logprobs"])],
            )
            for choice in choices
        ],
        num_cached_tokens=answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


def _positions(body: dict[str, Any]) -> Iterator[tuple[str, float, dict[str, float]]]:
    """For each position the chosen token, named `token_id:N`, its log-probability, and those of the most likely ones.
    In a completion these include the chosen token."""
    if "content" not in body:
        for token, logprob, likely in zip(body["tokens"], body["token_logprobs"], body["top_logprobs"], strict=True):
            yield token, logprob, likely or {}
        return
    for chosen in body["content"]:
        likely = {each["token"]: each["logprob"] for each in (chosen, *chosen["top_logprobs"])}
        yield chosen["token"], chosen["logprob"], likely


def _position(
    token: str, logprob: float, likely: dict[str, float], texts: Mapping[int, str], top: int
) -> dict[int, Logprob]:
    """The chosen token comes first. The gateway adds it to `likely` where it is not one of the `top`, as the last."""
    chosen = _id(token)
    ranked = sorted(((_id(token), each) for token, each in likely.items()), key=lambda pair: -pair[1])
    entries = {
        token: Logprob(each, rank if rank <= top else None, texts.get(token))
        for rank, (token, each) in enumerate(ranked, 1)
    }
    return {chosen: entries.pop(chosen, Logprob(logprob, None, texts.get(chosen))), **entries}


def _id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


def _prompt_logprobs(positions: list[dict[str, Any] | None]) -> list[dict[int, Logprob] | None]:
    return [
        None
        if position is None
        else {
            int(token): Logprob(each["logprob"], each.get("rank"), each.get("decoded_token"))
            for token, each in position.items()
        }
        for position in positions
    ]
