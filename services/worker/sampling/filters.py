"""top_k, top_p and min_p, as one threshold for each row: tokens whose weight is below it cannot be drawn.

Weights are probabilities up to a factor: float32 [R, W], W a multiple of CHUNK, zeros where there is no token. Tokens
that tie with the last one kept are kept too, so the outcome does not depend on the order of equal logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 32

_CANDIDATES = 64
"""Among so few tokens the nucleus nearly always ends; ordering a whole vocabulary costs more than a decode step."""
_HALF = 16
_LOWER = (1 << _HALF) - 1


def zero_below(weights: Tensor, threshold: Tensor) -> Tensor:
    """`weights` with 0 for what lies below `threshold` [R, 1]; overwrites them."""
    at_least = torch.empty_like(weights)
    torch.ge(weights, threshold, out=at_least)
    return weights.mul_(at_least)


def min_p_threshold(weights: Tensor, min_p: Tensor) -> Tensor:
    """The least weight kept, [R, 1]: of tokens at least `min_p` [R, 1] times as likely as the likeliest (Nguyen et al.,
    "Turning up the heat: min-p sampling", arXiv:2407.01082)."""
    return weights.amax(dim=1, keepdim=True) * min_p


def top_threshold(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least weight kept, [R, 1]: of the `top_k` [R, 1] greatest, the fewest whose share reaches `top_p` [R, 1].

    At least the greatest is kept. As in vLLM, top_p is a share of what top_k leaves; a top_k of W or more leaves all.
    """
    width = weights.shape[1]
    only_p = top_k >= width
    wanted = min(width, max(_CANDIDATES, int(torch.where(only_p, 1, top_k).max())))
    candidates = greatest_weights(weights, wanted)
    rank = torch.arange(wanted, device=weights.device)
    candidates = torch.where(rank < top_k, candidates, 0.0)
    total = torch.where(only_p, weights.sum(dim=1, keepdim=True), candidates.sum(dim=1, keepdim=True))
    before = candidates.cumsum(dim=1) - candidates
    inside = (rank < top_k) & ((before < top_p * total) | (top_p >= 1.0) | (rank == 0))
    threshold = candidates.gather(1, inside.sum(dim=1, keepdim=True) - 1)
    threshold = threshold.masked_fill(only_p & (top_p >= 1.0), 0.0)
    open_ended = only_p & (top_p < 1.0) & inside[:, -1:]
    if wanted < width and bool(open_ended.any()):
        rows = open_ended.squeeze(1).nonzero().squeeze(1)
        threshold[rows] = _nucleus_threshold(weights[rows], (top_p * total)[rows])
    return threshold


def greatest_weights(weights: Tensor, count: int) -> Tensor:
    """The `count` greatest of each row, in falling order: [R, count].

    They lie in the `count` chunks with the greatest maxima, so only those are looked through: 6 times as fast as `topk`
    over whole rows of 32,000.
    """
    rows, width = weights.shape
    chunks = width // CHUNK
    if 2 * count > chunks:
        return torch.topk(weights, count, dim=1).values
    by_chunk = weights.view(rows, chunks, CHUNK)
    best = torch.topk(by_chunk.amax(dim=2), count, dim=1, sorted=False).indices
    first = torch.arange(0, rows * chunks, chunks, device=weights.device).unsqueeze(1)
    looked_through = by_chunk.view(-1, CHUNK).index_select(0, (first + best).view(-1)).view(rows, -1)
    return torch.topk(looked_through, count, dim=1).values


def _nucleus_threshold(weights: Tensor, mass: Tensor) -> Tensor:
    """The greatest threshold at which the weights kept sum up to `mass` [R, 1], without sorting them.

    Positive floats are ordered as their bits are. So the weights are added up by their upper 16 bits, then those at
    the edge by their lower 16: a radix selection in two passes.
    """
    bits = weights.view(torch.int32)
    upper, lower = bits >> _HALF, bits & _LOWER
    edge, above = _first_to_reach(upper, weights, mass, 1 << (31 - _HALF))
    at_edge = weights * (upper == edge)
    last, _ = _first_to_reach(lower, at_edge, mass - above, 1 << _HALF)
    return ((edge << _HALF) | last).view(torch.float32)


def _first_to_reach(keys: Tensor, weights: Tensor, mass: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """(key, the weight above it), [R, 1] each: the greatest key at and above which `weights` sum up to `mass`."""
    by_key = torch.zeros(len(keys), most, dtype=weights.dtype, device=weights.device)
    by_key.scatter_add_(1, keys.long(), weights)
    from_top = by_key.flip(1).cumsum(dim=1)
    index = (from_top < mass).sum(dim=1, keepdim=True).clamp_(max=most - 1)
    above = torch.where(index > 0, from_top.gather(1, (index - 1).clamp_(min=0)), 0.0)
    return (most - 1 - index).to(torch.int32), above
