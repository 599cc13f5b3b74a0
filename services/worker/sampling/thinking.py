"""Ends thinking that has used its budget up: the tokens that close it are forced, one after the other.

A function of the output so far, with no state: where the end has occurred nothing is forced; else what is missing of it
behind the longest beginning of it that the output ends with. So it goes on in the middle after a re-dispatch, and
finishes an end that the model has begun by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.sampling.held import Held


def forced(logits: Tensor, held: Held, ends: Tensor, end_lengths: Tensor) -> Tensor:
    """logits [P, vocab] of rows past their budget → only the forced token's is finite, where there is one.

    ends [P, longest] int64, of which end_lengths [P, 1] tokens count. Overwrites `logits`.
    """
    due = ~_occurred(held, ends, end_lengths)
    token = ends.gather(1, _begun(held, ends, end_lengths))
    only = torch.full_like(logits, -torch.inf).scatter_(1, token, 0.0)
    return logits.copy_(torch.where(due, only, logits))


def _occurred(held: Held, ends: Tensor, end_lengths: Tensor) -> Tensor:
    """[P, 1] whether the output holds the whole end."""
    longest = held.tokens.shape[1]
    start = torch.arange(longest, device=ends.device)
    found = (start >= held.prompt_lengths) & (start + end_lengths <= held.lengths)
    for place in range(ends.shape[1]):
        here = (start + place).clamp(max=longest - 1)
        found &= (held.tokens[:, here] == ends[:, place : place + 1]) | (place >= end_lengths)
    return found.any(dim=1, keepdim=True)


def _begun(held: Held, ends: Tensor, end_lengths: Tensor) -> Tensor:
    """[P, 1] how many tokens of the end the output ends with, the whole end excepted."""
    begun = torch.zeros_like(end_lengths)
    last = held.last_output(ends.shape[1])
    for count in range(1, ends.shape[1]):
        matches = (last[:, -count:] == ends[:, :count]).all(dim=1, keepdim=True)
        begun = torch.where(matches & (count < end_lengths), count, begun)
    return begun
