"""Log-probabilities in the forms in which chats, completions and vLLM's `prompt_logprobs` show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from services.gateway.api.encoding.lazy_json import LazyArray
from shared.messages.gateway import LogprobText, PositionLogprobs

MIN_LOGPROB = -9999.0
"""JSON has no -Infinity; vLLM shows this instead."""

_encode = msgspec.json.Encoder().encode
TokenNaming = Callable[[LogprobText], str]
"""How a token is named."""


def by_text(text: LogprobText) -> str:
    """Names a token by its text."""
    return text.token


def by_id(text: LogprobText) -> str:
    """Names a token by its id: two tokens may have the same text, and half a character has none."""
    return f"token_id:{text.token_id}"


def chat_logprobs(positions: Iterable[PositionLogprobs], naming: TokenNaming = by_text) -> dict[str, Any]:
    """Returns `choices[].logprobs` of a chat."""
    return {"content": [_chat_position(position, naming) for position in positions], "refusal": None}


def lazy_chat_logprobs(positions: Iterable[PositionLogprobs], naming: TokenNaming) -> dict[str, Any]:
    """Returns the same, to be made as it is encoded."""
    return {"content": LazyArray(_chat_position(position, naming) for position in positions), "refusal": None}


def _chat_position(position: PositionLogprobs, naming: TokenNaming) -> dict[str, Any]:
    top = [_chat_token(text, naming) for text in position.top]
    return {**_chat_token(position.chosen, naming), "top_logprobs": top}


def _chat_token(text: LogprobText, naming: TokenNaming) -> dict[str, Any]:
    name = naming(text)
    raw = text.raw if naming is by_text else name.encode()
    return {"token": name, "logprob": max(text.logprob, MIN_LOGPROB), "bytes": list(raw)}


class CompletionLogprobs(NamedTuple):
    """The columns of `choices[].logprobs` of a completion. A prompt's first token has no log-probability."""

    tokens: list[str]
    logprobs: list[float | None]
    top: Iterator[dict[str, float] | msgspec.Raw | None]
    """Made as they are asked for, once: they are the most of it."""
    offsets: list[int]
    """Characters of the text before each token."""

    def body(self) -> dict[str, Any]:
        """Returns them as JSON."""
        return {**self.lazy_body(), "top_logprobs": list(self.top)}

    def lazy_body(self) -> dict[str, Any]:
        """Returns the same, to be made as it is encoded."""
        return {
            "text_offset": self.offsets,
            "token_logprobs": self.logprobs,
            "tokens": self.tokens,
            "top_logprobs": LazyArray(self.top),
        }

    def followed_by(self, later: CompletionLogprobs) -> CompletionLogprobs:
        """Returns these columns with `later` appended."""
        return CompletionLogprobs(
            self.tokens + later.tokens,
            self.logprobs + later.logprobs,
            chain(self.top, later.top),
            self.offsets + later.offsets,
        )


def completion_logprobs(
    positions: Sequence[PositionLogprobs], offset: int, naming: TokenNaming = by_text, top: int | None = None
) -> tuple[CompletionLogprobs, int]:
    """Returns the columns of tokens that start at character `offset` of the text, and the offset after the last.

    `top`: how many most likely tokens to show; None: all that were reported.
    """
    likely = map(partial(_top_logprobs, top=top, naming=naming), positions)
    columns = CompletionLogprobs([], [], likely, [])
    for position in positions:
        columns.tokens.append(naming(position.chosen))
        columns.logprobs.append(max(position.chosen.logprob, MIN_LOGPROB))
        columns.offsets.append(offset)
        offset += len(position.chosen.token)
    return columns, offset


def _top_logprobs(position: PositionLogprobs, top: int | None, naming: TokenNaming) -> dict[str, float]:
    """The chosen token and the most likely ones."""
    # Different tokens may have the same text. The more likely one is shown, as it is inserted last here.
    likely = {naming(text): max(text.logprob, MIN_LOGPROB) for text in reversed(position.top[:top])}
    chosen = {naming(position.chosen): max(position.chosen.logprob, MIN_LOGPROB)}
    return chosen | dict(reversed(likely.items()))


class EncodedEcho:
    """Owns the JSON of what is most likely at each position of an echoed prompt, made as parts of the prompt arrive: an
    echo that is streamed has all of it in one event, for which nobody else is to wait."""

    def __init__(self, naming: TokenNaming, top: int | None) -> None:
        self._naming, self._top = naming, top
        self.entries: list[msgspec.Raw] = []

    def extend(self, positions: Iterable[PositionLogprobs]) -> None:
        """The next ones."""
        self.entries += (msgspec.Raw(_encode(_top_logprobs(each, self._top, self._naming))) for each in positions)


def echoed_logprobs(
    first: str,
    first_id: int | None,
    positions: Sequence[PositionLogprobs],
    naming: TokenNaming,
    top: int | None,
    encoded: EncodedEcho | None = None,
) -> CompletionLogprobs:
    """Returns the columns of an echoed prompt: its first token, and `positions` from the second on. `encoded`: what is
    most likely at these, where that was made before."""
    name = first if naming is by_text or first_id is None else f"token_id:{first_id}"
    rest, _ = completion_logprobs(positions, len(first), naming, top)
    if encoded is not None:
        rest = rest._replace(top=iter(encoded.entries))
    return CompletionLogprobs([name], [None], iter([None]), [0]).followed_by(rest)


def logprobs_by_id(position: PositionLogprobs) -> dict[int, float]:
    """Returns those of the chosen token and the reported ones, by token id."""
    return {text.token_id: max(text.logprob, MIN_LOGPROB) for text in (*position.top, position.chosen)}


def prompt_logprobs(positions: Iterable[PositionLogprobs], top: int) -> LazyArray:
    """Returns vLLM's `prompt_logprobs`: for each token of the prompt, itself and the `top` most likely ones, by token
    id. The first entry is None."""
    return LazyArray(chain([None], (_by_token_id(position, top) for position in positions)))


def _by_token_id(position: PositionLogprobs, top: int) -> dict[str, Any]:
    ranked = [(position.chosen, position.rank), *((text, i) for i, text in enumerate(position.top[:top], start=1))]
    entries: dict[str, Any] = {}
    for text, rank in ranked:
        entry = {"logprob": max(text.logprob, MIN_LOGPROB), "rank": rank, "decoded_token": text.token}
        entries.setdefault(str(text.token_id), entry)
    return entries
