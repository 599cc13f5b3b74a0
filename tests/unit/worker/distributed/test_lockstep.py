"""Ranks of a data-parallel group begin the same steps whatever comes to whom when: nobody waits for ever, every plan is
computed, and nobody computes for nothing."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.distributed.host_notifier import NotifierState
from services.worker.distributed.lockstep import GroupTopology, Lockstep, StepsOutOfSync

DEADLINE = 60.0


class SharedNotifier:
    """The notifier of all ranks, in one process."""

    def __init__(self, ranks: int, called: int = 0) -> None:
        self.condition = threading.Condition()
        self.changes, self.called = 0, called
        self.shown = [called] * ranks
        self.waits = 0
        """Ranks that wait for it now."""


@dataclass
class RankNotifier:
    """One rank's end of it."""

    shared: SharedNotifier
    rank: int
    jitter: Random

    def state(self) -> NotifierState:
        with self.shared.condition:
            return NotifierState(self.shared.changes, self.shared.called)

    def notify(self, call: int | None = None) -> None:
        with self.shared.condition:
            if call is not None and 0 < (call - self.shared.called) % 2**32 < 2**31:
                self.shared.called = call
            self.shared.changes += 1
            self.shared.condition.notify_all()

    def wait(self, seen: int, seconds: float) -> None:
        """Without an end but the notification: one that is lost is seen."""
        with self.shared.condition:
            self.shared.waits += 1
            assert self.shared.condition.wait_for(lambda: self.shared.changes != seen, DEADLINE)
            self.shared.waits -= 1
        time.sleep(self.jitter.choice((0.0, 0.0, 0.0005)))

    def show(self, shown: int) -> None:
        time.sleep(self.jitter.choice((0.0, 0.0, 0.0005)))
        with self.shared.condition:
            self.shared.shown[self.rank] = shown

    def shown_by(self, rank: int) -> int:
        with self.shared.condition:
            return self.shared.shown[rank]


class Meeting:
    """Adds up what all of so many ranks bring, like a collective; ranks that do not come are waited for."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._brought: list[list[int]] = [[] for _ in range(ranks)]

    def meet(self, rank: int, numbers: list[int]) -> list[int]:
        self._brought[rank] = numbers
        self._barrier.wait(DEADLINE)
        sums = [sum(each) for each in zip(*self._brought, strict=True)]
        self._barrier.wait(DEADLINE)
        return sums


@dataclass(frozen=True)
class Plan:
    rows: tuple[int, ...]
    """Of each of its steps; a plan may have none."""
    meets: bool = False
    """Whether the engine's ranks meet before it, as where an epoch begins."""


@dataclass
class SimulatedRank:
    place: GroupTopology
    lockstep: Lockstep
    own: Meeting
    """Of its engine's ranks."""
    plans: queue.SimpleQueue[Plan | None] = field(default_factory=queue.SimpleQueue)
    computed: list[Plan] = field(default_factory=list)
    steps: list[tuple[int, ...]] = field(default_factory=list)
    """The rows of every step, those of others too."""
    error: BaseException | None = None

    def run(self) -> None:
        try:
            while True:
                self.lockstep.wait_for_plan(lambda: not self.plans.empty(), lambda: self._step(0))
                if (plan := self.plans.get_nowait()) is None:
                    return
                if plan.meets:
                    self.own.meet(self.place.rank, [1])
                for rows in plan.rows:
                    self._step(rows)
                    self.own.meet(self.place.rank, [rows])
                self.computed.append(plan)
        except BaseException as error:  # which the test raises
            self.error = error

    def _step(self, rows: int) -> None:
        self.steps.append(self.lockstep.begin(rows, rows).rows)

    def send(self, plan: Plan | None) -> None:
        self.plans.put(plan)
        self.lockstep.notify_plan()


def group(engines: int, tp: int, begun: int = 0, seed: int = 0) -> tuple[SharedNotifier, list[SimulatedRank]]:
    """`begun`: so many steps are over. `seed`: of who is late."""
    notifier, everybody = SharedNotifier(engines * tp, begun), Meeting(engines * tp)
    own = [Meeting(tp) for _ in range(engines)]
    ranks = []
    for number in range(engines * tp):
        place = GroupTopology(number // tp, engines, tp, number % tp)

        def agree(numbers, number=number):  # type: ignore[no-untyped-def]
            return everybody.meet(number, list(numbers))

        ranks.append(
            SimulatedRank(
                place, Lockstep(place, RankNotifier(notifier, number, Random(seed + number)), agree), own[place.engine]
            )
        )
        ranks[-1].lockstep._steps = begun
    return notifier, ranks


PLANS = st.builds(Plan, st.lists(st.integers(1, 9), max_size=2).map(tuple), st.booleans())


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from([(2, 1), (3, 1), (2, 2), (2, 3)]),
    sent=st.lists(st.tuples(st.integers(0, 2), PLANS), max_size=12),
    seed=st.integers(0, 2**16),
    begun=st.sampled_from([0, 2**32 - 2]),
)
def test_every_plan_is_computed_by_its_engines_ranks_in_steps_of_all(
    shape: tuple[int, int], sent: list[tuple[int, Plan]], seed: int, begun: int
) -> None:
    """Plans come to an engine's ranks in one order, but to each when it pleases: late behind steps of others, early."""
    engines, tp = shape
    notifier, ranks = group(engines, tp, begun, seed)
    threads = [threading.Thread(target=rank.run, daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    random, waiting = Random(seed), {number: list[Plan]() for number in range(len(ranks))}
    for engine, plan in sent:
        for beside in range(tp):
            waiting[engine % engines * tp + beside].append(plan)
    while left := [number for number, plans in waiting.items() if plans]:
        late = random.choice(left)
        ranks[late].send(waiting[late].pop(0))
        time.sleep(random.choice((0.0, 0.0, 0.0002, 0.001)))
    expected = [[plan for engine, plan in sent if engine % engines == number] for number in range(engines)]
    until(lambda: all(rank.computed == expected[rank.place.engine] or rank.error for rank in ranks))
    steps = max(len(rank.steps) for rank in ranks)  # some may still be in the last one, which others had a plan for
    until(lambda: notifier.waits == len(ranks) or any(rank.error for rank in ranks))
    for rank in ranks:
        rank.send(None)
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive(), "a rank waits for ever"
    assert [rank.error for rank in ranks] == [None] * len(ranks)
    assert all(rank.steps == ranks[0].steps for rank in ranks)
    assert len(ranks[0].steps) == steps, "a step was computed that nobody had a plan for"
    assert all(any(rows) for rows in ranks[0].steps)
    for number, plans in enumerate(expected):
        own = Counter(rows for plan in plans for rows in plan.rows)
        assert Counter(step[number] for step in ranks[0].steps if step[number]) == own


def until(condition: object) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.0002)


def test_a_rank_that_brings_other_rows_than_its_engines_first_says_so() -> None:
    _, (first, second) = group(1, 2)
    thread = threading.Thread(target=lambda: first.lockstep.begin(3, 1), daemon=True)
    thread.start()
    with pytest.raises(StepsOutOfSync, match="rank 1 has 2 rows in the group's step 1, the first 3"):
        second.lockstep.begin(2, 1)
    thread.join(DEADLINE)
