"""Log-probabilities as the model gives them, before anything is done to the logits.

They are computed where the logits are, and become messages once they are on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.ops.transfer import to_device, to_host
from shared.messages.generation import TokenLogprobs

_AT_ONCE = 1 << 23
"""Logits turned to float32 at once: a prompt has many rows, and 32 MiB are enough to keep a device busy."""

Int32s = NDArray[np.int32]

FindLogprobs = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor]]
"""Finds by one kernel: of logits [N, vocab], numbers of rows, int64 [R], a token for each, int64 [R], and how many of
the likeliest → by how much each row's logits exceed log-probabilities [R], the token's rank [R] (see `LogprobTensors`),
the likeliest tokens, of equal ones the lower first, and their log-probabilities [R, likeliest], or fewer where those
are too many for it. As by PyTorch, within float32."""


@runtime_checkable
class SupportsFindLogprobs(Protocol):
    """Operations that find log-probabilities by a kernel of their own."""

    @property
    def find_logprobs(self) -> FindLogprobs:
        """See `FindLogprobs`."""


def find_logprobs_of(ops: object) -> FindLogprobs | None:
    """The kernel of `ops`; None: they have none."""
    return ops.find_logprobs if isinstance(ops, SupportsFindLogprobs) else None


class LogprobTensors(NamedTuple):
    """The log-probabilities of R rows' tokens, and of other tokens beside them."""

    tokens: Tensor
    """[R] int64 the token of each row."""
    own: Tensor
    """[R] its log-probability."""
    others: Tensor
    """[R, most] int64 the other tokens that are reported."""
    values: Tensor
    """[R, most] of the others."""
    counts: NDArray[np.int32]
    """[R] how many of the others are reported."""
    ranks: Tensor | None = None
    """[R] how many tokens are as likely as this one, itself included; None where not asked for."""

    def on_host(self) -> LogprobTensors:
        """These tensors on the host; see `transfer.to_host`."""
        ranks = None if self.ranks is None else to_host(self.ranks)
        tokens, own, others, values = map(to_host, self[:4])
        return LogprobTensors(tokens, own, others, values, self.counts, ranks)

    def entries(self) -> list[TokenLogprobs]:
        """The entries as messages. The tensors must be on the host."""
        ranks = [None] * len(self.counts) if self.ranks is None else self.ranks.tolist()
        return [
            TokenLogprobs(token, own, tuple(zip(others[:count], values[:count], strict=True)), rank)
            for token, own, others, values, count, rank in zip(
                *(part.tolist() for part in self[:4]), self.counts.tolist(), ranks, strict=True
            )
        ]


class RowLogprobs(NamedTuple):
    """Log-probabilities of some of a batch's rows."""

    rows: NDArray[np.intp]
    likelihoods: LogprobTensors


def logprobs_by_row(logprobs: tuple[RowLogprobs, ...]) -> dict[int, TokenLogprobs]:
    """Log-probabilities as messages, by row, for the rows that requested them. The tensors must be on the host."""
    parts = ((rows.tolist(), part.entries()) for rows, part in logprobs)
    return {row: entry for rows, entries in parts for row, entry in zip(rows, entries, strict=True)}


def prompt_logprobs(
    logits: Tensor, tokens: NDArray[np.int64], counts: NDArray[np.int32], kernel: FindLogprobs | None = None
) -> list[LogprobTensors]:
    """The log-probabilities of a prompt's tokens: logits [R, vocab] of any dtype, `tokens` [R] that followed each, and
    `counts` [R] of the most likely ones to report beside it → the rows in their order, with ranks, in parts."""
    every, own = torch.arange(len(logits)), to_device(tokens, logits.device)
    if (found := found_by(kernel, logits, every, own, counts)) is not None:
        return [found]
    step = max(1, _AT_ONCE // logits.shape[1])
    parts: list[LogprobTensors] = []
    for first in range(0, len(logits), step):
        rows = slice(first, first + step)
        parts.append(_with_ranks(logits[rows].float(), own[rows], counts[rows]))
    return parts


def _with_ranks(raw: Tensor, tokens: Tensor, counts: NDArray[np.int32]) -> LogprobTensors:
    ranks = (raw >= raw.gather(1, tokens.unsqueeze(1))).sum(dim=1)
    return top_logprobs(raw, tokens, counts)._replace(ranks=ranks)


def found_by(
    kernel: FindLogprobs | None, logits: Tensor, rows: Tensor, tokens: Tensor, counts: NDArray[np.int32]
) -> LogprobTensors | None:
    """See `top_logprobs`, of `rows` of the logits and with ranks, by a kernel; None where there is none."""
    if kernel is None:
        return None
    most = min(int(counts.max()), logits.shape[1])
    totals, ranks, others, values = kernel(logits, rows, tokens, most)
    if others.shape[1] < most:
        top = torch.topk(logits.index_select(0, rows).float(), most, dim=1)
        others, values = top.indices, top.values - totals.unsqueeze(1)
    own = logits[rows, tokens].float() - totals
    return LogprobTensors(tokens, own, others, values, counts, ranks)


def top_logprobs(raw: Tensor, tokens: Tensor, counts: NDArray[np.int32]) -> LogprobTensors:
    """raw float32 [R, vocab], tokens int64 [R] → each with the `counts` [R] most likely tokens of its row."""
    total = raw.logsumexp(dim=1, keepdim=True)
    top = torch.topk(raw, min(int(counts.max()), raw.shape[1]), dim=1)
    return LogprobTensors(tokens, _of(raw, tokens, total), top.indices, top.values - total, counts)


def token_logprobs(raw: Tensor, tokens: Tensor, others: Tensor, counts: NDArray[np.int32]) -> LogprobTensors:
    """See `top_logprobs`, with the first `counts` of `others` [R, most] instead."""
    total = raw.logsumexp(dim=1, keepdim=True)
    return LogprobTensors(tokens, _of(raw, tokens, total), others, raw.gather(1, others) - total, counts)


def _of(raw: Tensor, tokens: Tensor, total: Tensor) -> Tensor:
    return (raw.gather(1, tokens.unsqueeze(1)) - total).squeeze(1)
