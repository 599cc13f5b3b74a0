"""Steps whose tokens the host has not seen, and what waits for it to see them: histories, grammars, and drafts."""

from __future__ import annotations

from collections import deque

import numpy as np

from services.worker.backend import MOST_BEGUN
from services.worker.launched_step import LaunchedStep
from services.worker.rank import Rank
from services.worker.rows import Slots

_MOST = 2 * MOST_BEGUN
"""Steps that are settled some time after they are over, when somebody needs what they drew; older ones are at once."""


class UnsettledSteps:
    """Owns them. Settling one waits until the device is done with it."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._steps: deque[LaunchedStep] = deque()

    def clear(self) -> None:
        """Nobody wants to know any more."""
        self._steps.clear()

    def add(self, step: LaunchedStep) -> None:
        self._steps.append(step)
        while len(self._steps) > _MOST:
            self._settle_oldest()

    def settle_all(self) -> None:
        while self._steps:
            self._settle_oldest()

    def settle_drafts(self) -> None:
        """Until it is known how many of the latest step's drafts stand, sequences have no lengths."""
        if self._steps and self._steps[-1].tries:
            self.settle_all()

    def settle_for(self, slots: Slots) -> None:
        """Until all is known that was drawn for `slots`."""
        needed = [np.isin(slots, step.batch.sampled_slots).any() for step in self._steps]
        for _ in range(max((place + 1 for place, need in enumerate(needed) if need), default=0)):
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        step = self._steps.popleft()
        verdict, batch, rank = step.verdict(), step.batch, self._rank
        there = np.flatnonzero(rank.sequences.tenancies[batch.sampled_slots] == step.tenancies)
        slots, counts, tokens = batch.sampled_slots[there], verdict.counts[there], verdict.tokens[there]
        if step.tries:
            rank.sequences.append(slots, counts, tokens)
        else:
            rank.sequences.fill(slots, step.places[there], tokens[:, 0])
        if rank.guided is not None:
            rank.guided.take(slots, counts, tokens)
