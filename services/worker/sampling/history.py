"""What logits are changed by that depends on the tokens a sequence holds: penalties, bad words, thinking budgets.

All by vLLM's definitions. Histories come as tensors on the logits' device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.ops.transfer import to_device

HistoryTokens = NDArray[np.int32] | Tensor

HistoryLookup = Callable[
    [NDArray[np.intp], NDArray[np.int32]], tuple[HistoryTokens, NDArray[np.int32], NDArray[np.int32]]
]
"""Sequence indices and output positions [P] → (tokens [P, longest], lengths [P], prompt lengths [P]) as they are before
those positions are drawn: a sequence may have several rows, each of which sees the drafts before it as drawn. Tokens
that the host does not know yet come as a tensor, on the logits' device."""

NO_TOKEN = -1
"""What comes before the output's first token; equals no token."""


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """The tokens that P rows hold before their draws."""

    tokens: Tensor
    """[P, longest] int64; what lies behind a row's length is not read."""
    lengths: Tensor
    """[P, 1] tokens of prompt and output."""
    prompt_lengths: Tensor
    """[P, 1]"""

    def last_output(self, count: int) -> Tensor:
        """[P, count] the newest output tokens, the last one at the end; NO_TOKEN where there are fewer."""
        place = self.lengths - count + torch.arange(count, device=self.tokens.device)
        tokens = self.tokens.gather(1, place.clamp(min=0))
        return torch.where(place >= self.prompt_lengths, tokens, NO_TOKEN)


def read_history(
    history: HistoryLookup, seq_indices: NDArray[np.intp], positions: NDArray[np.int32], device: torch.device
) -> TokenHistory:
    """What the rows hold that are about to draw the output tokens at `positions`."""
    tokens, lengths, prompts = history(seq_indices, positions)
    there = tokens if isinstance(tokens, Tensor) else to_device(tokens, device)
    columns = to_device(np.stack((lengths, prompts), axis=1).astype(np.int64), device)
    return TokenHistory(there.long(), columns[:, :1], columns[:, 1:])


# Penalties.


@dataclass(frozen=True, slots=True)
class Penalties:
    """How strongly the tokens that P rows hold are penalised. All on the logits' device."""

    history: TokenHistory
    presence: Tensor
    """[P, 1] taken off each token that the output holds."""
    frequency: Tensor
    """[P, 1] taken off for each time that the output holds it."""
    repetition: Tensor
    """[P, 1] what positive logits of tokens in prompt or output are divided by, and negative ones multiplied."""


def apply_penalties(logits: Tensor, by: Penalties) -> Tensor:
    """logits float32 [P, vocab] → the same, penalised; overwrites them.

    Only the logits of tokens held are looked at. A token held several times is written several times, with the same
    value; so is one of them for every place behind the row's end, and for what is never drawn, as what stands in
    prompts of Llama 3.2 Vision for an image.
    """
    place, held = torch.arange(by.history.tokens.shape[1], device=logits.device), by.history.tokens
    known = (place < by.history.lengths) & (held < logits.shape[1])
    tokens = torch.where(known, held, torch.where(known, held, 0).amax(dim=1, keepdim=True))
    in_output = (known & (place >= by.history.prompt_lengths)).to(logits.dtype)
    counts = torch.zeros_like(logits).scatter_add_(1, tokens, in_output).gather(1, tokens)
    values = logits.gather(1, tokens)
    values = torch.where(values > 0, values / by.repetition, values * by.repetition)
    values -= by.frequency * counts + by.presence * (counts > 0)
    return logits.scatter_(1, tokens, values)


# Bad words: the last token of each is banned where the output ends with the others.


ANY_TOKEN = -2
"""In a beginning: matches any token, as the word begins later."""


class BadWords:
    """The words of each sequence, in arrays as large as the most and longest words so far. Unused places repeat its
    first word, which changes nothing."""

    def __init__(self, max_sequences: int) -> None:
        self._beginnings = np.zeros((max_sequences, 0, 0), dtype=np.int32)
        """[sequences, words, longest - 1] all tokens of a word but its last, moved to the end."""
        self._lasts = np.zeros((max_sequences, 0), dtype=np.int64)
        """[sequences, words]"""

    def put(self, seq_index: int, words: Sequence[Sequence[int]]) -> None:
        """Replaces the sequence's words; there is at least one, and none is empty."""
        self._make_room(len(words), max(map(len, words)) - 1)
        room = self._beginnings.shape[2]
        beginnings = [[ANY_TOKEN] * (room - len(word) + 1) + list(word[:-1]) for word in words]
        lasts = [word[-1] for word in words]
        spare = self._lasts.shape[1] - len(words)
        self._beginnings[seq_index] = beginnings + beginnings[:1] * spare
        self._lasts[seq_index] = lasts + lasts[:1] * spare

    def _make_room(self, words: int, longest: int) -> None:
        max_sequences, had_words, had_longest = self._beginnings.shape
        words, longest = max(words, had_words), max(longest, had_longest)
        if (words, longest) == (had_words, had_longest):
            return
        beginnings = np.full((max_sequences, words, longest), ANY_TOKEN, dtype=np.int32)
        lasts = np.zeros((max_sequences, words), dtype=np.int64)
        if had_words:
            beginnings[:, :had_words, longest - had_longest :] = self._beginnings
            beginnings[:, had_words:] = beginnings[:, :1]
            lasts[:, :had_words] = self._lasts
            lasts[:, had_words:] = self._lasts[:, :1]
        self._beginnings, self._lasts = beginnings, lasts

    def banned(self, logits: Tensor, seq_indices: NDArray[np.intp], history: TokenHistory) -> Tensor:
        """logits [P, vocab] of the sequences at `seq_indices` → -inf for what would end a word; overwrites `logits`."""
        device = logits.device
        beginnings, lasts = (
            to_device(self._beginnings[seq_indices], device),
            to_device(self._lasts[seq_indices], device),
        )
        before = history.last_output(beginnings.shape[2]).unsqueeze(1)
        due = ((beginnings == before) | (beginnings == ANY_TOKEN)).all(dim=2)
        # Words with the same last token meet in one place: what is added there survives, what is written would not.
        return logits.scatter_add_(1, lasts, torch.where(due, -torch.inf, 0.0).to(logits.dtype))


# Thinking budgets: where one is used up, the tokens that close the thinking are forced, one after the other.
#
# A function of the output so far, with no state: thinking begins behind its start marker (or with the output); where
# the end marker has followed nothing is forced; else what is missing of it behind the longest beginning of it that the
# output ends with. So it goes on in the middle after a re-dispatch, and finishes an end that the model has begun.


class ThinkingMarkers(NamedTuple):
    """A marker for each of P rows."""

    tokens: Tensor
    """[P, longest] int64; what lies behind a row's length is not read."""
    lengths: Tensor
    """[P, 1] int64; 0 where there is none."""


class ThinkingBudgets(NamedTuple):
    """What bounds the thinking of P rows."""

    budget: Tensor
    """[P, 1] tokens."""
    start: ThinkingMarkers
    end: ThinkingMarkers


def force_thinking_end(logits: Tensor, history: TokenHistory, thinking: ThinkingBudgets) -> Tensor:
    """logits [P, vocab] → where thinking must end now, only the token that does it is finite; overwrites `logits`."""
    begun, began = _found(history, thinking.start, history.prompt_lengths)
    ended, _ = _found(history, thinking.end, began)
    due = begun & ~ended & (history.lengths - began >= thinking.budget)
    token = thinking.end.tokens.gather(1, _written(history, thinking.end))
    value = torch.where(due, 0.0, logits.gather(1, token))
    return logits.masked_fill_(due, -torch.inf).scatter_(1, token, value)


def _found(history: TokenHistory, markers: ThinkingMarkers, begin: Tensor) -> tuple[Tensor, Tensor]:
    """([P, 1] whether the marker occurs at `begin` [P, 1] or behind, [P, 1] where it ends first)."""
    longest = history.tokens.shape[1]
    place = torch.arange(longest + 1, device=history.tokens.device)
    found = (place >= begin) & (place + markers.lengths <= history.lengths)
    for i in range(markers.tokens.shape[1]):
        here = (place + i).clamp(max=longest - 1)
        found &= (history.tokens[:, here] == markers.tokens[:, i : i + 1]) | (i >= markers.lengths)
    # argmax of booleans is the first that is true
    first = found.to(torch.int8).argmax(dim=1, keepdim=True)
    return found.any(dim=1, keepdim=True), first + markers.lengths


def _written(history: TokenHistory, markers: ThinkingMarkers) -> Tensor:
    """[P, 1] how many tokens of the marker the output ends with, short of the whole marker."""
    written = torch.zeros_like(markers.lengths)
    last = history.last_output(markers.tokens.shape[1])
    for count in range(1, markers.tokens.shape[1]):
        matches = (last[:, -count:] == markers.tokens[:, :count]).all(dim=1, keepdim=True)
        written = torch.where(matches & (count < markers.lengths), count, written)
    return written
