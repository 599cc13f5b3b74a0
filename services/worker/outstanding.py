"""Whose tokens the last stage is still to tell: what an earlier stage of a pipeline must know before it goes on."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from services.worker.batch import Batch
from services.worker.pipeline import ExpectedTokens, Pipeline
from services.worker.sequences import SequenceTable
from services.worker.speculation.standing import standing
from shared.ids import SequenceId
from shared.messages.worker import Work

STEPS_PER_STAGE = 2
"""Steps in flight for each stage before their tokens are awaited though no plan goes on with them."""


class _Step(NamedTuple):
    number: int
    batch: Batch
    tokens: ExpectedTokens


class OutstandingTokens:
    """Owns the steps whose tokens are on their way, and which sequences wait for one. It appends them to the table."""

    def __init__(self, pipeline: Pipeline, sequences: SequenceTable) -> None:
        self._pipeline = pipeline
        self._sequences = sequences
        self._steps: deque[_Step] = deque()
        self._awaits: dict[SequenceId, int] = {}
        """The number of the step that draws the sequence's next token."""
        self._number = 0

    def expect(self, batch: Batch) -> None:
        """The last stage is going to draw for `batch`."""
        if not batch.sampled:
            return
        self._number += 1
        self._steps.append(_Step(self._number, batch, self._pipeline.expect(batch.drawn_at_most)))
        self._awaits.update(dict.fromkeys(batch.sampled, self._number))

    def release(self, sequence: SequenceId) -> None:
        """It has left the table: its token is nobody's, even if it comes back."""
        self._awaits.pop(sequence, None)

    def settle(self, work: tuple[Work, ...]) -> None:
        """Waits until the tokens are there that `work` goes on with."""
        needed = max((self._awaits.get(item.sequence, 0) for item in work), default=0)
        while self._steps and (self._steps[0].number <= needed or len(self._steps) > self._most):
            self._settle_oldest()

    def settle_all(self) -> None:
        while self._steps:
            self._settle_oldest()

    @property
    def _most(self) -> int:
        return STEPS_PER_STAGE * self._pipeline.stages

    def _settle_oldest(self) -> None:
        number, batch, expected = self._steps.popleft()
        tokens = np.array(expected.wait(), dtype=np.int32).reshape(len(batch.sampled), -1)
        awaits = self._awaits
        rows = [row for row, sequence in enumerate(batch.sampled) if awaits.get(sequence) == number]
        for row in rows:
            del awaits[batch.sampled[row]]
        slots, drawn = batch.sampled_slots[rows], tokens[rows]
        drafts = self._sequences.drafts(slots, drawn.shape[1] - 1)
        self._sequences.append(slots, 1 + standing(drawn, drafts, batch.drafted[rows]), drawn)
