"""Which of a router's picks are this rank's, and how often each expert is picked. Knows tensors, no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.expert_parallel.placement import ExpertPlacement
from services.worker.ops.interface import PackedExperts, Picks


class LocalExperts(NamedTuple):
    """One layer's experts by their numbers on this rank.

    Of several replicas a row's picks and least likely expert choose one: so every rank chooses the same, and a row's
    result does not depend on the other rows of a step."""

    numbers: Tensor
    """int64 [replicas, E]: this rank's number of each replica of an expert; -1: it is another rank's. Behind the last
    replica of an expert, undefined."""
    replicas: Tensor | None
    """int64 [E]: of each expert; None: each has one."""
    holders: Tensor
    """int64 [replicas, E]: the rank of each replica. Behind the last replica of an expert, undefined."""

    @classmethod
    def of(cls, placement: ExpertPlacement, rank: int, device: torch.device) -> LocalExperts:
        """Those of `rank`, numbered in rising order."""
        experts = max(max(each) for each in placement.ranks) + 1
        own = {expert: number for number, expert in enumerate(placement.experts_of(rank))}
        holders = [placement.holders(expert) for expert in range(experts)]
        replicas = [len(each) for each in holders]
        numbers = torch.full((max(replicas), experts), -1, dtype=torch.int64)
        held = torch.zeros_like(numbers)
        for expert, ranks in enumerate(holders):
            for replica, holder in enumerate(ranks):
                held[replica, expert] = holder
                if holder == rank:
                    numbers[replica, expert] = own[expert]
        counts = torch.tensor(replicas).to(device) if max(replicas) > 1 else None
        return cls(numbers.to(device), counts, held.to(device))

    def own_picks(self, picks: Picks, logits: Tensor) -> Picks:
        """The `picks` of a router's `logits` by this rank's numbers; those of other ranks are -1."""
        return Picks(picks.chances, self.own_numbers(self.places(picks, logits)).to(picks.experts.dtype))

    def places(self, picks: Picks, logits: Tensor) -> Tensor:
        """int64 [n, picks of a row]: of each of a router's picks, expert and replica as one number, which says the same
        on every rank."""
        experts = picks.experts.long()
        if self.replicas is None:
            return experts
        word = experts.sum(dim=1, keepdim=True) + logits.argmin(dim=1, keepdim=True)
        return experts + word % self.replicas[experts] * self.holders.shape[1]

    def experts_of(self, places: Tensor) -> Tensor:
        """The expert of each of these `places`."""
        return places % self.holders.shape[1]

    def holders_of(self, places: Tensor) -> Tensor:
        """The rank of each of these `places`."""
        return self.holders.view(-1)[places]

    def own_numbers(self, places: Tensor) -> Tensor:
        """This rank's numbers of these `places`, -1 for those of other ranks."""
        return self.numbers.view(-1)[places]


@dataclass(slots=True)
class RankExperts:
    """A layer's experts that a rank has. `ExpertRearranger` replaces both between two steps."""

    packed: PackedExperts
    local: LocalExperts | None = None
    """Expert parallelism: which experts they are; None: all."""


def count_picks(counts: Tensor, picks: Tensor) -> None:
    """Adds to `counts` (int64 [E]) how often each expert is among `picks`. Does not wait for the device."""
    experts = picks.flatten().long()
    counts.scatter_add_(0, experts, counts.new_ones(1).expand(len(experts)))
