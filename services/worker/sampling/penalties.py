"""Changes logits by what a sequence already holds, by vLLM's definitions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.sampling.held import Held


@dataclass(frozen=True, slots=True)
class Penalties:
    """How strongly to hold what P rows have against their next tokens. All on the logits' device."""

    held: Held
    presence: Tensor
    """[P, 1] taken off each token that the output holds."""
    frequency: Tensor
    """[P, 1] taken off for each time that the output holds it."""
    repetition: Tensor
    """[P, 1] what positive logits of tokens in prompt or output are divided by, and negative ones multiplied."""


def penalised(logits: Tensor, by: Penalties) -> Tensor:
    """logits float32 [P, vocab] → the same, penalised; overwrites them.

    Only the logits of tokens held are looked at. A token held several times is written several times, with the same
    value; so is a row's first token for every place behind the row's end.
    """
    place = torch.arange(by.held.tokens.shape[1], device=logits.device)
    known = place < by.held.lengths
    tokens = torch.where(known, by.held.tokens, by.held.tokens[:, :1])
    in_output = (known & (place >= by.held.prompt_lengths)).to(logits.dtype)
    counts = torch.zeros_like(logits).scatter_add_(1, tokens, in_output).gather(1, tokens)
    values = logits.gather(1, tokens)
    values = torch.where(values > 0, values / by.repetition, values * by.repetition)
    values -= by.frequency * counts + by.presence * (counts > 0)
    return logits.scatter_(1, tokens, values)
