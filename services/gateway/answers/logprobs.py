"""Log-probabilities as chats and as completions show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from services.gateway.answers.choice import ChoiceState
from shared.messages.gateway import LogprobText, PositionLogprobs

LOWEST = -9999.0
"""JSON has no -Infinity; vLLM shows this instead."""

Naming = Callable[[LogprobText], str]
"""How a token is called."""


def by_text(text: LogprobText) -> str:
    return text.token


def by_id(text: LogprobText) -> str:
    """Two tokens may have the same text, and half a character has none."""
    return f"token_id:{text.token_id}"


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def _chat_token(text: LogprobText, naming: Naming) -> dict[str, Any]:
    name = naming(text)
    raw = text.raw if naming is by_text else name.encode()
    return {"token": name, "logprob": _finite(text.logprob), "bytes": list(raw)}


def chat_logprobs(positions: Iterable[PositionLogprobs], naming: Naming = by_text) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    content = [
        {
            **_chat_token(position.chosen, naming),
            "top_logprobs": [_chat_token(text, naming) for text in position.top],
        }
        for position in positions
    ]
    return {"content": content, "refusal": None}


def _likely(position: PositionLogprobs, top: int | None, naming: Naming) -> dict[str, float]:
    """The token itself and the `top` most likely ones (None: all that were told)."""
    # Different tokens may have the same text; the more likely one is shown, as it comes last here.
    likely = {naming(text): _finite(text.logprob) for text in reversed(position.top[:top])}
    return {naming(position.chosen): _finite(position.chosen.logprob)} | dict(reversed(likely.items()))


class Columns(NamedTuple):
    """`choices[].logprobs` of a completion, as far as it came. The prompt's first token has no probability."""

    tokens: list[str]
    logprobs: list[float | None]
    top: list[dict[str, float] | None]
    offsets: list[int]

    def shown(self) -> dict[str, Any]:
        return {
            "text_offset": self.offsets,
            "token_logprobs": self.logprobs,
            "tokens": self.tokens,
            "top_logprobs": self.top,
        }


def completion_columns(
    positions: Iterable[PositionLogprobs], offset: int, naming: Naming = by_text, top: int | None = None
) -> tuple[Columns, int]:
    """Of tokens of which the first lies at character `offset` of the text; and the offset behind the last."""
    columns = Columns([], [], [], [])
    for position in positions:
        columns.tokens.append(naming(position.chosen))
        columns.logprobs.append(_finite(position.chosen.logprob))
        columns.top.append(_likely(position, top, naming))
        columns.offsets.append(offset)
        offset += len(position.chosen.token)
    return columns, offset


def echoed_columns(choice: ChoiceState, naming: Naming, top: int | None) -> Columns:
    """Of the prompt, which the completion's text begins with."""
    first = choice.echoed_first or ""
    name = first if naming is by_text or not choice.prompt_ids else f"token_id:{choice.prompt_ids[0]}"
    rest, _ = completion_columns(choice.prompt_logprobs, len(first), naming, top)
    return Columns([name, *rest.tokens], [None, *rest.logprobs], [None, *rest.top], [0, *rest.offsets])


def joined(echoed: Columns, output: Columns) -> Columns:
    return Columns(
        echoed.tokens + output.tokens,
        echoed.logprobs + output.logprobs,
        echoed.top + output.top,
        echoed.offsets + output.offsets,
    )


def prompt_logprobs(positions: Iterable[PositionLogprobs], top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt its own and the `top` most likely ones, by token id."""
    return [None, *(_ranked(position, top) for position in positions)]


def _ranked(position: PositionLogprobs, top: int) -> dict[str, Any]:
    ranked = [(position.chosen, position.rank), *((text, i) for i, text in enumerate(position.top[:top], start=1))]
    shown: dict[str, Any] = {}
    for text, rank in ranked:
        entry = {"logprob": _finite(text.logprob), "rank": rank, "decoded_token": text.token}
        shown.setdefault(str(text.token_id), entry)
    return shown
