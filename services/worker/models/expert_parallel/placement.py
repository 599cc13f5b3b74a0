"""Which ranks of a stage have which experts of a layer. No torch.

Every rank has all rows, as tensor parallelism leaves them on every rank. So none is sent anywhere: a rank computes the
picks whose experts it has, and the sum over the ranks, which is there anyway, puts a row's experts together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain

from msgspec import Struct

from services.worker.models.config import ModelError
from services.worker.models.expert_parallel.eplb import rebalance_experts

MIN_GAIN = 0.05
"""Share of the busiest rank's load that has to go before experts are moved."""


class ExpertPlacement(Struct, frozen=True):
    """The experts of a layer on the ranks of a stage."""

    ranks: tuple[tuple[int, ...], ...]
    """The experts of each rank in rising order, those with several replicas there as often."""

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """The experts that `rank` has, each once, in rising order."""
        return tuple(sorted(set(self.ranks[rank])))

    def holders(self, expert: int) -> tuple[int, ...]:
        """The ranks of its replicas."""
        return tuple(rank for rank, experts in enumerate(self.ranks) for each in experts if each == expert)

    def coming_from(self, other: ExpertPlacement) -> int:
        """How many experts ranks have here that they do not have there, over all ranks."""
        return sum(len(set(new) - set(old)) for new, old in zip(self.ranks, other.ranks, strict=True))

    def loads(self, load: Sequence[float]) -> list[float]:
        """What each rank computes where experts are chosen so often, the replicas of each equally."""
        replicas = Counter(chain.from_iterable(self.ranks))
        return [sum(load[expert] / replicas[expert] for expert in experts) for experts in self.ranks]


def spread_evenly(experts: int, ranks: int) -> ExpertPlacement:
    """Neighbours together; the first ranks have one more where `experts` do not divide. Raises ModelError where a rank
    would have none."""
    if experts < ranks:
        raise ModelError(f"enable_expert_parallel: {experts} experts cannot be spread over {ranks} ranks")
    size, more = divmod(experts, ranks)
    ends = list(accumulate(size + (rank < more) for rank in range(ranks)))
    return ExpertPlacement(tuple(tuple(range(first, end)) for first, end in zip((0, *ends[:-1]), ends, strict=True)))


def balance_experts(
    load: Sequence[float], ranks: int, *, redundant: int = 0, groups: int = 1, hosts: int = 1
) -> ExpertPlacement:
    """By DeepSeek's algorithm; or evenly where that leaves the busiest rank less to do, or nothing was measured.

    `load`: how often each expert is chosen. `groups` of neighbours, of which each stays on one host where they divide
    over `hosts`. Raises ModelError for numbers of replicas that do not divide over the ranks."""
    experts = len(load)
    if (experts + redundant) % ranks:
        raise ModelError(
            f"num_redundant_experts {redundant}: {experts} experts and these do not divide over {ranks} ranks"
        )
    even = spread_evenly(experts, ranks)
    if not any(load):
        return even
    places = rebalance_experts(load, experts + redundant, groups, hosts if ranks % hosts == 0 else 1, ranks)
    each = len(places) // ranks
    found = ExpertPlacement(tuple(tuple(sorted(places[at : at + each])) for at in range(0, len(places), each)))
    return found if max(found.loads(load)) < max(even.loads(load)) else even


def improve_placement(
    current: ExpertPlacement, load: Sequence[float], *, redundant: int = 0, groups: int = 1, hosts: int = 1
) -> ExpertPlacement:
    """Where experts are to go from where they are `current`ly, by `balance_experts`; `current` itself where that takes
    less than MIN_GAIN from the busiest rank. Ranks of a host are alike, so each is given what it has most of."""
    ranks = len(current.ranks)
    found = balance_experts(load, ranks, redundant=redundant, groups=groups, hosts=hosts)
    if max(found.loads(load)) > (1 - MIN_GAIN) * max(current.loads(load)):
        return current
    left, each = list(found.ranks), ranks // hosts if ranks % hosts == 0 else ranks
    placed = []
    for rank, held in enumerate(current.ranks):
        here = left[: each - rank % each]
        placed.append(max(here, key=lambda experts: len(set(experts) & set(held))))
        left.remove(placed[-1])
    return ExpertPlacement(tuple(placed))
