"""Steps whose tokens the host has not seen, and what waits for it to see them: histories, grammars, and drafts."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from services.worker.backend import MOST_BEGUN
from services.worker.crossing import sent
from services.worker.launched_step import LaunchedStep
from services.worker.rank import Rank
from services.worker.rows import Int32s, Slots
from services.worker.shortfall import Shortfall

_MOST = 2 * MOST_BEGUN
"""Steps that are settled some time after they are over, when somebody needs what they drew; older ones are at once."""


class _Unsettled(NamedTuple):
    step: LaunchedStep
    places: Int32s
    """[Q] the position of each first token drawn, as far as that is known."""


class UnsettledSteps:
    """Owns them. Settling one waits until the device is done with it."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._steps: deque[_Unsettled] = deque()

    def clear(self) -> None:
        """Nobody wants to know any more."""
        self._steps.clear()

    def add(self, step: LaunchedStep, places: Int32s) -> None:
        """`places` [Q]: see `SequenceTable.assume`."""
        self._steps.append(_Unsettled(step, places))
        while len(self._steps) > _MOST:
            self._settle_oldest()

    @property
    def latest(self) -> LaunchedStep | None:
        """The step that was begun last; None where it is settled."""
        return self._steps[-1].step if self._steps else None

    def settle_all(self) -> None:
        while self._steps:
            self._settle_oldest()

    def settle_drafts(self, *, but_latest: bool) -> None:
        """Until it is known how many drafts stand: of all steps, or of all but the latest, whose `shortfall` the next
        one is moved back by."""
        steps = list(self._steps)[: len(self._steps) - but_latest]
        self._settle(max((place + 1 for place, each in enumerate(steps) if each.step.trial is not None), default=0))

    def settle_for(self, slots: Slots) -> None:
        """Until all is known that was drawn for `slots`."""
        needed = [np.isin(slots, each.step.batch.sampled_slots).any() for each in self._steps]
        self._settle(max((place + 1 for place, need in enumerate(needed) if need), default=0))

    def shortfall(self, slots: Slots) -> Shortfall | None:
        """Of `slots` [P], behind the latest step; None: they are as long as they are taken to be."""
        latest = self.latest
        if latest is None or latest.trial is None:
            return None
        sequences, drafting = self._rank.sequences, latest.batch.sampled_slots
        place = np.full(len(sequences.lengths), len(drafting))
        theirs = np.flatnonzero(sequences.tenancies[drafting] == latest.tenancies)
        place[drafting[theirs]] = theirs
        return latest.trial.shortfall().of(sent(place[slots], self._rank.device))

    def _settle(self, steps: int) -> None:
        for _ in range(steps):
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        step, places = self._steps.popleft()
        verdict, batch, rank = step.verdict(), step.batch, self._rank
        there = np.flatnonzero(rank.sequences.tenancies[batch.sampled_slots] == step.tenancies)
        slots, counts, tokens = batch.sampled_slots[there], verdict.counts[there], verdict.tokens[there]
        rank.sequences.fill_all(slots, places[there], counts, tokens)
        if step.trial is not None:
            self._shorten(slots, 1 + batch.drafted[there] - counts)
        if rank.guided is not None:
            rank.guided.take(slots, counts, tokens)

    def _shorten(self, slots: Slots, tokens: Int32s) -> None:
        """What lies behind drafts that do not stand was taken to lie further on."""
        sequences = self._rank.sequences
        sequences.shorten(slots, tokens)
        missing = np.zeros_like(sequences.lengths)
        missing[slots] = tokens
        for later in self._steps:
            later.places[:] -= missing[later.step.batch.sampled_slots]
