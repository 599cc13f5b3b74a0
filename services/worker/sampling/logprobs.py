"""Log-probabilities as the model gives them, before anything is done to the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.messages.generation import TokenLogprobs

_AT_ONCE = 1 << 23
"""Logits turned to float32 at once: a prompt has many rows, and 32 MiB are enough to keep a device busy."""


class Ranked(NamedTuple):
    """Rows of logits whose tokens are known already: a prompt's."""

    tokens: NDArray[np.int64]
    """[R] what followed each row."""
    counts: NDArray[np.int32]
    """[R] how many of the most likely ones are told beside it."""


def prompt_logprobs(logits: Tensor, wanted: Ranked) -> list[TokenLogprobs]:
    """logits [R, vocab] of any dtype → one entry for each row, with the token's rank."""
    step = max(1, _AT_ONCE // logits.shape[1])
    entries: list[TokenLogprobs] = []
    for first in range(0, len(logits), step):
        rows = slice(first, first + step)
        entries += _ranked(logits[rows].float(), wanted.tokens[rows], wanted.counts[rows])
    return entries


def _ranked(raw: Tensor, tokens: NDArray[np.int64], counts: NDArray[np.int32]) -> list[TokenLogprobs]:
    chosen = torch.from_numpy(tokens).to(raw.device).unsqueeze(1)
    ranks = (raw >= raw.gather(1, chosen)).sum(dim=1).tolist()
    told = most_likely(raw, chosen, counts)
    return [
        TokenLogprobs(token, logprob, top, rank)
        for token, (logprob, top), rank in zip(tokens.tolist(), told, ranks, strict=True)
    ]


Told = tuple[float, tuple[tuple[int, float], ...]]
"""The token's log-probability, and others with theirs."""


def most_likely(raw: Tensor, chosen: Tensor, counts: NDArray[np.int32]) -> list[Told]:
    """raw float32 [R, vocab], chosen int64 [R, 1] → each with the `counts` [R] most likely tokens of its row."""
    total = raw.logsumexp(dim=1, keepdim=True)
    of_chosen = (raw.gather(1, chosen) - total).squeeze(1).tolist()
    top = torch.topk(raw, min(int(counts.max()), raw.shape[1]), dim=1)
    ids, values = top.indices.tolist(), (top.values - total).tolist()
    return [
        (logprob, tuple(zip(row[:count], logprobs[:count], strict=True)))
        for logprob, row, logprobs, count in zip(of_chosen, ids, values, counts.tolist(), strict=True)
    ]


def of_tokens(raw: Tensor, chosen: Tensor, ids: NDArray[np.int64], counts: Sequence[int]) -> list[Told]:
    """As `most_likely`, with the first `counts` of the tokens `ids` [R, most] instead."""
    total = raw.logsumexp(dim=1, keepdim=True)
    of_chosen = (raw.gather(1, chosen) - total).squeeze(1).tolist()
    values = (raw.gather(1, torch.from_numpy(ids).to(raw.device)) - total).tolist()
    return [
        (logprob, tuple(zip(row[:count], logprobs[:count], strict=True)))
        for logprob, row, logprobs, count in zip(of_chosen, ids.tolist(), values, counts, strict=True)
    ]
