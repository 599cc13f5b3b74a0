"""Experts move on all ranks before the same step, however long each takes to have its own; or on none of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.models.config import ModelError
from services.worker.models.expert_parallel.expert_balance import ExpertMoves, balance_of
from services.worker.models.expert_parallel.expert_load import ExpertLoad
from services.worker.models.expert_parallel.load_window import LoadWindow
from services.worker.models.expert_parallel.local_experts import LocalExperts, RankExperts
from services.worker.models.expert_parallel.placement import (
    ExpertPlacement,
    improve_placement,
    spread_evenly,
)
from services.worker.models.expert_parallel.rearrangement import ExpertRearranger, RearrangerParts
from services.worker.models.expert_parallel.throttle import ThreadThrottle
from services.worker.ops.interface import PackedExperts

CPU = torch.device("cpu")
LAYERS, EXPERTS, RANKS, INTERVAL = (1, 4, 5), 6, 3, 4
EVEN = spread_evenly(EXPERTS, RANKS)
DEADLINE = 120.0
MAX_STEPS = 100_000
"""How many a rearrangement takes is the machine's: threads prepare it beside steps."""


class Hurry(ThreadThrottle):
    """Steps are as short as the thread's work here: it is to be as quick as they are, on a busy machine, too."""

    def start(self) -> None:
        pass

    def rest(self) -> None:
        pass


class Meeting:
    """The sum over ranks, which are threads here."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=DEADLINE)
        self._given: list[Tensor | None] = [None] * RANKS

    def sum(self, rank: int, x: Tensor) -> Tensor:
        self._given[rank] = x.clone()
        self._barrier.wait()
        total = torch.stack([each for each in self._given if each is not None]).sum(0)
        self._barrier.wait()
        return total


@dataclass
class Rank:
    """What steps of it have found."""

    number: int
    meeting: Meeting
    seed: int
    fails_at: int | None = None
    """The layer whose experts it cannot have."""
    counts: list[Tensor] = field(default_factory=list)
    seen: list[tuple[ExpertPlacement, ...]] = field(default_factory=list)
    """Where experts were in each step."""

    def __post_init__(self) -> None:
        self.random = Random(self.seed + self.number)
        packed = PackedExperts(EVEN.experts_of(self.number))  # those that it has, by name
        self.layers = {layer: RankExperts(packed, LocalExperts.of(EVEN, self.number, CPU)) for layer in LAYERS}
        if self.number == 0:
            self.counts = [torch.zeros(EXPERTS, dtype=torch.int64) for _ in LAYERS]
        parts = RearrangerParts(
            layers=self.layers,
            rank=self.number,
            interval=INTERVAL,
            place=partial(improve_placement, redundant=3),
            gather=self.gather,
            throttle=Hurry(),
            share=partial(self.meeting.sum, self.number),
            window=LoadWindow(self.counts, 2, INTERVAL) if self.number == 0 else None,
            device=CPU,
        )
        self.rearranger = ExpertRearranger(parts, (EVEN,) * 6)
        self.rearranger.restart()

    def gather(self, layer: int, wanted: Sequence[int], held: Sequence[int], packed: PackedExperts) -> PackedExperts:
        time.sleep(self.random.choice((0.0, 0.0, 0.003)))
        if layer == self.fails_at:
            raise ModelError("the file is gone")
        assert packed == held
        return PackedExperts(tuple(wanted))

    def run(self, until: Callable[[ExpertMoves], bool]) -> None:
        for step in range(MAX_STEPS):
            self.rearranger.begin_step()
            self.seen.append(tuple(self.rearranger.placements[layer] for layer in LAYERS))
            for layer, experts in self.layers.items():
                assert experts.packed == self.rearranger.placements[layer].experts_of(self.number)
            if until(self.rearranger.moves):
                return
            for number, counts in enumerate(self.counts):
                counts[(step // 12 + number) % EXPERTS] += 90
                counts += 1
            time.sleep(0.0005)


def run(seed: int, until: Callable[[ExpertMoves], bool], fails: int | None = None) -> list[Rank]:
    """`until`: of what is the same on all ranks in each step."""
    meeting = Meeting()
    ranks = [Rank(number, meeting, seed, fails_at=4 if number == fails else None) for number in range(RANKS)]
    threads = [threading.Thread(target=rank.run, args=(until,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert all(until(rank.rearranger.moves) for rank in ranks), [rank.rearranger.moves for rank in ranks]
    assert len({len(rank.seen) for rank in ranks}) == 1, "every rank computed every step"
    return ranks


@given(st.integers(0, 2**16))
@settings(max_examples=8, deadline=None)
def test_all_ranks_have_the_same_experts_before_each_step(seed: int) -> None:
    first, *others = run(seed, lambda moves: moves.rearrangements >= 3 and moves.experts > moves.layers > 0)
    assert all(other.seen == first.seen for other in others)
    changes = [sum(a != b for a, b in zip(*pair, strict=True)) for pair in pairwise(first.seen)]
    assert max(changes) == 1, "a layer at a time"
    load = [96 if expert == 0 else 6 for expert in range(EXPERTS)]
    assert balance_of(first.seen[8][0].loads(load)) >= balance_of(EVEN.loads(load))


def test_where_one_rank_cannot_have_its_experts_all_keep_theirs(caplog: pytest.LogCaptureFixture) -> None:
    ranks = run(1, lambda moves: moves.failures > 0, fails=2)
    assert all(rank.seen == ranks[0].seen for rank in ranks)
    assert {placements[1:] for placements in ranks[0].seen} == {(EVEN, EVEN)}, "layers from that one on"
    assert ranks[0].seen[-1][0] != EVEN
    assert "the file is gone" in caplog.text


def test_a_bug_on_the_thread_beside_steps_ends_the_rank() -> None:
    counts = torch.zeros(EXPERTS, dtype=torch.int64)
    packed = PackedExperts(EVEN.experts_of(0))
    parts = RearrangerParts(
        layers={0: RankExperts(packed)},
        rank=0,
        interval=1,
        place=lambda *_: 1 / 0,  # type: ignore[arg-type, return-value]
        gather=lambda *_: packed,
        throttle=ThreadThrottle(),
        share=lambda x: x,
        window=LoadWindow([counts], 1, 1),
        device=CPU,
    )
    rank = ExpertRearranger(parts, (EVEN,))
    rank.restart()

    def compute() -> None:
        for _ in range(10_000):
            rank.begin_step()
            counts.add_(1)
            time.sleep(0.001)

    with pytest.raises(ZeroDivisionError):
        compute()


def test_a_window_has_the_steps_before_a_decision_and_no_others() -> None:
    counts = torch.zeros(2, dtype=torch.int64)
    window, found = LoadWindow([counts], window=5, interval=3), {}
    for step in range(1, 13):
        window.begin_step(step)
        if step % 3 == 0:
            found[step] = window.load(step)[0].tolist()
        counts += torch.tensor([1, step])
    assert found == {3: [2, 1 + 2], 6: [5, 1 + 2 + 3 + 4 + 5], 9: [5, 4 + 5 + 6 + 7 + 8], 12: [5, 7 + 8 + 9 + 10 + 11]}


def test_experts_stay_for_a_small_gain_and_ranks_keep_what_they_can() -> None:
    assert improve_placement(EVEN, [10, 10, 10, 10, 10, 11]) == EVEN
    current = ExpertPlacement(((3, 4, 5), (0, 1, 2)))
    found = improve_placement(current, [50, 60, 1, 1, 1, 1])
    assert found != current
    assert found.coming_from(current) == 2
    assert [len(set(new) & set(old)) for new, old in zip(found.ranks, current.ranks, strict=True)] == [2, 2]


def test_picks_count_where_they_were_computed() -> None:
    counts = torch.tensor([6, 2, 1, 1])
    load = ExpertLoad({0: counts}, [spread_evenly(4, 2)])
    load._change(0, ExpertPlacement(((0, 2), (1, 3))))
    counts += torch.tensor([10, 20, 1, 2])
    assert load.by_rank() == {0: [8.0 + 11.0, 2.0 + 22.0]}


def test_a_thread_beside_steps_rests_in_proportion_to_its_work() -> None:
    worked, rests = [0.0], list[float]()
    throttle = ThreadThrottle(0.25, clock=lambda: worked[0], sleep=rests.append)
    for piece in (0.01, 0.0001, 0.0001, 0.004):
        worked[0] += piece
        throttle.rest()
    assert rests == pytest.approx([0.03, 0.0126]), "short pieces have one together"
