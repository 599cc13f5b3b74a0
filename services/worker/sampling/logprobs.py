"""Log-probabilities as the model gives them, before anything is done to the logits.

They are found where the logits are, and put into words when they have come from there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.crossing import fetched, sent
from shared.messages.generation import TokenLogprobs

_AT_ONCE = 1 << 23
"""Logits turned to float32 at once: a prompt has many rows, and 32 MiB are enough to keep a device busy."""


class Ranked(NamedTuple):
    """Rows of logits whose tokens are known already: a prompt's."""

    tokens: NDArray[np.int64]
    """[R] what followed each row."""
    counts: NDArray[np.int32]
    """[R] how many of the most likely ones are told beside it."""


class Likelihoods(NamedTuple):
    """Of R rows: their tokens' log-probabilities, and those of other tokens beside them."""

    tokens: Tensor
    """[R] int64"""
    own: Tensor
    """[R]"""
    others: Tensor
    """[R, most] int64"""
    values: Tensor
    """[R, most] of the others."""
    counts: NDArray[np.int32]
    """[R] how many of the others are told."""
    ranks: Tensor | None = None
    """[R] how many tokens are as likely as this one, itself included; None where nobody asks."""

    def on_host(self) -> Likelihoods:
        """The same, see `crossing.fetched`."""
        ranks = None if self.ranks is None else fetched(self.ranks)
        tokens, own, others, values = map(fetched, self[:4])
        return Likelihoods(tokens, own, others, values, self.counts, ranks)

    def entries(self) -> list[TokenLogprobs]:
        """In words, of what is on the host."""
        ranks = [None] * len(self.counts) if self.ranks is None else self.ranks.tolist()
        return [
            TokenLogprobs(token, own, tuple(zip(others[:count], values[:count], strict=True)), rank)
            for token, own, others, values, count, rank in zip(
                *(part.tolist() for part in self[:4]), self.counts.tolist(), ranks, strict=True
            )
        ]


class Told(NamedTuple):
    """Log-probabilities of some of a batch's rows."""

    rows: NDArray[np.intp]
    likelihoods: Likelihoods


def by_row(told: tuple[Told, ...]) -> dict[int, TokenLogprobs]:
    """In words, of what is on the host; by row, for the rows that asked."""
    parts = ((rows.tolist(), part.entries()) for rows, part in told)
    return {row: entry for rows, entries in parts for row, entry in zip(rows, entries, strict=True)}


def prompt_logprobs(logits: Tensor, wanted: Ranked) -> list[Likelihoods]:
    """logits [R, vocab] of any dtype → the rows in their order, with ranks, in parts."""
    step = max(1, _AT_ONCE // logits.shape[1])
    parts: list[Likelihoods] = []
    for first in range(0, len(logits), step):
        rows = slice(first, first + step)
        parts.append(_ranked(logits[rows].float(), sent(wanted.tokens[rows], logits.device), wanted.counts[rows]))
    return parts


def _ranked(raw: Tensor, tokens: Tensor, counts: NDArray[np.int32]) -> Likelihoods:
    ranks = (raw >= raw.gather(1, tokens.unsqueeze(1))).sum(dim=1)
    return most_likely(raw, tokens, counts)._replace(ranks=ranks)


def most_likely(raw: Tensor, tokens: Tensor, counts: NDArray[np.int32]) -> Likelihoods:
    """raw float32 [R, vocab], tokens int64 [R] → each with the `counts` [R] most likely tokens of its row."""
    total = raw.logsumexp(dim=1, keepdim=True)
    top = torch.topk(raw, min(int(counts.max()), raw.shape[1]), dim=1)
    return Likelihoods(tokens, _of(raw, tokens, total), top.indices, top.values - total, counts)


def of_tokens(raw: Tensor, tokens: Tensor, others: Tensor, counts: NDArray[np.int32]) -> Likelihoods:
    """As `most_likely`, with the first `counts` of `others` [R, most] instead."""
    total = raw.logsumexp(dim=1, keepdim=True)
    return Likelihoods(tokens, _of(raw, tokens, total), others, raw.gather(1, others) - total, counts)


def _of(raw: Tensor, tokens: Tensor, total: Tensor) -> Tensor:
    return (raw.gather(1, tokens.unsqueeze(1)) - total).squeeze(1)
