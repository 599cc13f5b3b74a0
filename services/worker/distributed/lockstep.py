"""Which step of a data-parallel group a rank computes next: one of its engine's plan, or one of others'. No torch.

The engines of a group have a scheduler and a KV cache each, and spread the experts of their model over all their
ranks. So the ranks meet in every layer that is a mixture, and a step is computed by all of them or by none. A rank
whose engine has a plan *calls* the next step; those without compute it too, as far as it needs their experts (vLLM
calls that a dummy batch, and a run of such steps a wave). While nobody calls, nobody computes, and all wait for the
notifier.

Steps have numbers, and every rank computes each in turn; at its begin all say how many rows they bring. That is all
that engines have to agree on. The ranks of *one* engine meet elsewhere too, where attention is split over them: they
must have the same order of plans and of others' steps. Its first rank decides it, and shows how many of both it has
begun. It cannot go on behind a step that the others have not come to, so these numbers say all:

first rank shows    | another rank, which has begun `plans` and `steps`
--------------------|-------------------------------------------------------------------------
more plans          | takes its next plan, once that has arrived
as many, more steps | computes the others' step
as many of both     | waits
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from services.worker.distributed.host_notifier import HostNotifier

LOOK_EVERY = 1.0
"""Seconds after which a rank looks again without a notification. None is ever lost; this is for what may be wrong
all the same."""
_WORD = 1 << 32


class GroupTopology(NamedTuple):
    """Where a rank stands among those of a data-parallel group. They are counted engine by engine."""

    engine: int
    """The number of its engine in the group, from 0."""
    engines: int
    tp: int
    """Ranks of each engine."""
    rank: int
    """Its number among the ranks of its engine."""

    @property
    def in_group(self) -> int:
        """Its number among the ranks of the group."""
        return self.engine * self.tp + self.rank

    @property
    def group_size(self) -> int:
        """Ranks of the group."""
        return self.engines * self.tp

    @property
    def first(self) -> int:
        """The number in the group of its engine's first rank."""
        return self.engine * self.tp

    @property
    def leads(self) -> bool:
        """Whether it is its engine's first rank."""
        return self.rank == 0


class StepRows(NamedTuple):
    """What the engines of a group bring to a step."""

    rows: tuple[int, ...]
    """Of each engine."""
    last: tuple[int, ...]
    """In the last layer, where only rows are left that something is to be known of."""


class LatestStep(NamedTuple):
    """The last step of a group that has begun."""

    rows: int
    """Of all engines."""
    began: float
    """When all ranks had come, on `time.perf_counter`'s clock."""


class SumOverRanks(Protocol):
    """How the ranks of a group begin a step."""

    def __call__(self, numbers: Sequence[int]) -> Sequence[int]:
        """The sums of every rank's `numbers`; returns when all have called it. Raises RankGone."""


class StepsOutOfSync(Exception):
    """A rank brings other rows to a step than its engine's first rank, so that they compute different plans. The text
    says how many."""


class Lockstep:
    """Owns how many plans and steps this rank has begun. Used by the thread that computes; `notify_plan` by any."""

    def __init__(self, place: GroupTopology, notifier: HostNotifier, sum_over_ranks: SumOverRanks) -> None:
        self.place = place
        self._notifier = notifier
        self._sum_over_ranks = sum_over_ranks
        self._plans = self._steps = 0
        self.latest: LatestStep | None = None
        """None before the first step."""
        self.dummy_steps = 0
        """Steps without a row of this engine."""

    def wait_for_plan(self, arrived: Callable[[], bool], execute_dummy_step: Callable[[], None]) -> None:
        """Returns when this rank's next plan has `arrived` and may be begun, as it then is. Until then it computes the
        steps that others call. Raises what computing them raises."""
        while True:
            seen = self._notifier.state()
            if self._may_begin(arrived):
                break
            if self._is_called(seen.called):
                execute_dummy_step()
            else:
                self._notifier.wait(seen.changes, LOOK_EVERY)
        self._plans += 1
        if self.place.leads and self.place.tp > 1:
            self._show()
            self._notifier.notify()

    def notify_plan(self) -> None:
        """A plan may have arrived."""
        self._notifier.notify()

    def begin(self, rows: int, last: int) -> StepRows:
        """The next step, to which this engine brings so many rows; 0 of both: it is the others'. Returns when all have
        come. Raises RankGone, StepsOutOfSync."""
        self._steps = (self._steps + 1) % _WORD
        place = self.place
        if place.leads:
            if place.tp > 1:
                self._show()
            if rows or place.tp > 1:
                self._notifier.notify(self._steps if rows else None)
        numbers = [0] * (2 * place.engines)
        if place.leads:
            numbers[2 * place.engine : 2 * place.engine + 2] = rows, last
        sums = self._sum_over_ranks(numbers)
        step = StepRows(tuple(sums[::2]), tuple(sums[1::2]))
        if (step.rows[place.engine], step.last[place.engine]) != (rows, last):
            known = step.rows[place.engine]
            raise StepsOutOfSync(
                f"rank {place.rank} has {rows} rows in the group's step {self._steps}, the first {known}"
            )
        self.latest = LatestStep(sum(step.rows), time.perf_counter())
        self.dummy_steps += not rows
        return step

    def _may_begin(self, arrived: Callable[[], bool]) -> bool:
        if not arrived():
            return False
        return self.place.leads or self._shown()[0] != self._plans % _WORD

    def _is_called(self, called: int) -> bool:
        """Whether a step was begun that this rank has no plan for."""
        if self.place.leads:
            return 0 < (called - self._steps) % _WORD < _WORD // 2
        plans, steps = self._shown()
        return plans == self._plans % _WORD and steps != self._steps

    def _show(self) -> None:
        self._notifier.show(self._plans % _WORD * _WORD + self._steps)

    def _shown(self) -> tuple[int, int]:
        return divmod(self._notifier.shown_by(self.place.first), _WORD)


class LockstepMember:
    """What makes a decoder a rank of a data-parallel group; see `services.worker.backend.GroupMember`."""

    lockstep: Lockstep

    def execute_dummy_step(self) -> None:
        """A step of the group without rows of this engine. Raises RankGone, StepsOutOfSync."""
        raise NotImplementedError

    def wait_for_plan(self, arrived: Callable[[], bool]) -> None:
        """See `GroupMember.wait_for_plan`. Raises RankGone, StepsOutOfSync."""
        self.lockstep.wait_for_plan(arrived, self.execute_dummy_step)

    def notify_plan(self) -> None:
        """See `GroupMember.notify_plan`."""
        self.lockstep.notify_plan()

    @property
    def latest(self) -> LatestStep | None:
        """See `GroupMember.latest`."""
        return self.lockstep.latest

    @property
    def dummy_steps(self) -> int:
        """See `GroupMember.dummy_steps`."""
        return self.lockstep.dummy_steps
