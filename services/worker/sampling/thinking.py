"""Ends thinking that has used its budget up: the tokens that close it are forced, one after the other.

A function of the output so far, with no state: thinking begins behind its start mark (or with the output); where the
end mark has followed nothing is forced; else what is missing of it behind the longest beginning of it that the output
ends with. So it goes on in the middle after a re-dispatch, and finishes an end that the model has begun by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.sampling.held import Held


class Marks(NamedTuple):
    """One mark of P rows, each its own."""

    tokens: Tensor
    """[P, longest] int64; what lies behind a row's length is not read."""
    lengths: Tensor
    """[P, 1] int64; 0 where there is none."""


class Thoughts(NamedTuple):
    """What bounds the thinking of P rows."""

    budget: Tensor
    """[P, 1] tokens."""
    start: Marks
    end: Marks


def forced(logits: Tensor, held: Held, thoughts: Thoughts) -> Tensor:
    """logits [P, vocab] → where thinking must end now, only the token that does it is finite; overwrites `logits`."""
    begun, began = _found(held, thoughts.start, held.prompt_lengths)
    ended, _ = _found(held, thoughts.end, began)
    due = begun & ~ended & (held.lengths - began >= thoughts.budget)
    token = thoughts.end.tokens.gather(1, _written(held, thoughts.end))
    value = torch.where(due, 0.0, logits.gather(1, token))
    return logits.masked_fill_(due, -torch.inf).scatter_(1, token, value)


def _found(held: Held, marks: Marks, begin: Tensor) -> tuple[Tensor, Tensor]:
    """([P, 1] whether the mark stands at `begin` [P, 1] or behind, [P, 1] where it ends first)."""
    longest = held.tokens.shape[1]
    place = torch.arange(longest + 1, device=held.tokens.device)
    found = (place >= begin) & (place + marks.lengths <= held.lengths)
    for i in range(marks.tokens.shape[1]):
        here = (place + i).clamp(max=longest - 1)
        found &= (held.tokens[:, here] == marks.tokens[:, i : i + 1]) | (i >= marks.lengths)
    # argmax of booleans is the first that is true
    first = found.to(torch.int8).argmax(dim=1, keepdim=True)
    return found.any(dim=1, keepdim=True), first + marks.lengths


def _written(held: Held, marks: Marks) -> Tensor:
    """[P, 1] how many tokens of the mark the output ends with, the whole mark excepted."""
    written = torch.zeros_like(marks.lengths)
    last = held.last_output(marks.tokens.shape[1])
    for count in range(1, marks.tokens.shape[1]):
        matches = (last[:, -count:] == marks.tokens[:, :count]).all(dim=1, keepdim=True)
        written = torch.where(matches & (count < marks.lengths), count, written)
    return written
