"""Changes logits by what a sequence already holds, by vLLM's definitions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """For P rows: their tokens and how strongly to hold them against the next one. All on the logits' device."""

    tokens: Tensor
    """[P, longest] int64 token histories; what lies behind a row's length is not read."""
    lengths: Tensor
    """[P, 1] tokens of prompt and output."""
    prompt_lengths: Tensor
    """[P, 1]"""
    presence: Tensor
    """[P, 1] taken off each token that the output holds."""
    frequency: Tensor
    """[P, 1] taken off for each time that the output holds it."""
    repetition: Tensor
    """[P, 1] what positive logits of tokens in prompt or output are divided by, and negative ones multiplied."""


def penalised(logits: Tensor, by: Penalties) -> Tensor:
    """logits float32 [P, vocab] → the same, penalised; a new tensor."""
    place = torch.arange(by.tokens.shape[1], device=logits.device)
    held = place < by.lengths
    in_output = held & (place >= by.prompt_lengths)
    tokens = torch.where(held, by.tokens, 0)
    counts = torch.zeros_like(logits).scatter_add_(1, tokens, in_output.to(logits.dtype))
    seen = torch.zeros_like(logits).scatter_add_(1, tokens, held.to(logits.dtype)) > 0
    repeated = torch.where(logits > 0, logits / by.repetition, logits * by.repetition)
    logits = torch.where(seen, repeated, logits)
    return logits - by.frequency * counts - by.presence * (counts > 0)
