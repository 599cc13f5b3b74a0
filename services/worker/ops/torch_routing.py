"""Which experts of a mixture each row goes to, in portable PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.interface import Picks, Routing, Scoring


class ExpertRows(NamedTuple):
    """The rows that chose one expert, and their weights."""

    expert: int
    rows: Tensor
    """[m] ascending"""
    chances: Tensor
    """[m, 1] float32"""


def route(logits: Tensor, routing: Routing) -> Picks:
    """See `Ops.choose_experts`; int64."""
    logits = logits.float()
    scores = _scores(logits, routing.scoring)
    experts = _best(scores, routing) if routing.given is None else routing.given
    chances = scores.gather(1, experts)
    if routing.renormalised:
        chances = chances / chances.sum(dim=-1, keepdim=True)
    return Picks(chances * routing.scale if routing.scale != 1.0 else chances, experts)


def _scores(logits: Tensor, scoring: Scoring) -> Tensor:
    match scoring:
        case "softmax":
            return logits.softmax(dim=-1)
        case "sigmoid":
            return logits.sigmoid()
        case "sqrtsoftplus":
            return F.softplus(logits).sqrt()
        case _:
            assert_never(scoring)


def _best(scores: Tensor, routing: Routing) -> Tensor:
    choosing = scores if routing.bias is None else scores + routing.bias
    if routing.groups > 1:
        choosing = choosing.masked_fill(~_in_best_groups(choosing, routing), float("-inf"))
    return choosing.topk(routing.chosen, dim=-1).indices


def _in_best_groups(choosing: Tensor, routing: Routing) -> Tensor:
    """[n, E] → which experts are of the groups that are chosen from."""
    rows, experts = choosing.shape
    by_group = choosing.view(rows, routing.groups, experts // routing.groups)
    worth = by_group.amax(dim=-1) if routing.bias is None else by_group.topk(2, dim=-1).values.sum(dim=-1)
    best = torch.zeros_like(worth, dtype=torch.bool)
    best.scatter_(1, worth.topk(routing.chosen_groups, dim=-1).indices, True)
    return best.repeat_interleave(experts // routing.groups, dim=1)


def rows_by_expert(picks: Picks, count: int) -> Iterator[ExpertRows]:
    """Yields the rows of each of `count` experts that has any, in ascending order. Waits for the device."""
    chosen, experts = picks.experts.shape[1], picks.experts.flatten()
    order = experts.argsort(stable=True)
    rows, sorted_chances = order // chosen, picks.chances.flatten()[order].unsqueeze(1)
    first, *sizes = torch.bincount(experts + 1, minlength=count + 1).tolist()  # those of other ranks come first
    for expert, size in enumerate(sizes):
        if size:
            part = slice(first, first + size)
            yield ExpertRows(expert, rows[part], sorted_chances[part])
            first += size
