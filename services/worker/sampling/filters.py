"""top_k, top_p and min_p, as one threshold for each row: tokens whose logit is below it cannot be drawn.

Tokens that tie with the last one kept are kept too, so the outcome does not depend on the order of equal logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CANDIDATES = 256
"""Sorting a whole vocabulary costs more than a decode step; the nucleus is nearly always among so few."""


def top_threshold(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least logit kept, [R, 1]: of the `top_k` [R, 1] greatest, the fewest whose probability reaches `top_p`.

    logits: float32 [R, vocab], already divided by the temperature. At least the greatest is kept. As in vLLM, top_p
    is a share of what top_k leaves.
    """
    vocab = logits.shape[1]
    only_p = top_k >= vocab
    # Enough for every row with a top_k; rows without one may need more.
    bounded_k = torch.where(only_p, 1, top_k)
    wanted = min(vocab, max(_CANDIDATES, int(bounded_k.max())))
    total = torch.logsumexp(logits, dim=1, keepdim=True)
    greatest = torch.topk(logits, wanted, dim=1).values
    if wanted < vocab and _nucleus_open(greatest, total, only_p, top_p):
        greatest = logits.sort(dim=1, descending=True).values
    kept = greatest.shape[1]
    rank = torch.arange(kept, device=logits.device)
    in_k = rank < top_k
    share = torch.where(only_p, total, torch.logsumexp(greatest.masked_fill(~in_k, float("-inf")), 1, keepdim=True))
    probability = (greatest - share).exp().masked_fill(~in_k, 0.0)
    before = probability.cumsum(dim=1) - probability
    in_p = in_k & ((before < top_p) | (top_p >= 1.0) | (rank == 0))
    last = in_p.sum(dim=1, keepdim=True) - 1
    keeps_all = only_p & (top_p >= 1.0)
    return greatest.gather(1, last).masked_fill(keeps_all, float("-inf"))


def _nucleus_open(greatest: Tensor, total: Tensor, only_p: Tensor, top_p: Tensor) -> bool:
    """Whether some row without top_k needs more tokens than `greatest` holds."""
    covered = (greatest - total).exp().sum(dim=1, keepdim=True)
    return bool((only_p & (top_p < 1.0) & (covered < top_p)).any())


def min_p_threshold(logits: Tensor, min_p: Tensor) -> Tensor:
    """The least logit kept, [R, 1]: tokens at least `min_p` [R, 1] times as likely as the likeliest (Nguyen et al.,
    "Turning up the heat: min-p sampling", arXiv:2407.01082)."""
    return logits.amax(dim=1, keepdim=True) + min_p.log()
