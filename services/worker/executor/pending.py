"""Steps whose tokens the host does not know yet, and what waits for it to know them.

`ExpectedSteps` are those of an earlier stage of a pipeline, whose tokens the last stage draws and sends; `PendingSteps`
are those that a device has been given ahead of the host.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.worker.backend import MAX_LAUNCHED_STEPS
from services.worker.batch.batch import Batch
from services.worker.batch.pooled_rows import PooledVectors
from services.worker.batch.prompt_rows import ScoredPromptRows
from services.worker.batch.rows import Indices, Int32s
from services.worker.batch.sequences import SequenceTable
from services.worker.distributed.communicator import ExpectedTokens, Pipeline
from services.worker.executor.runner import RankState
from services.worker.executor.timing import Mark
from services.worker.ops.transfer import to_device
from services.worker.sampling.random_numbers import RejectedDrafts
from services.worker.sampling.sampler import SamplerOutput
from services.worker.speculation.verification import AcceptedTokens, VerifiedDrafts, accepted_counts
from shared.ids import SequenceId
from shared.messages.scheduler import SequenceFailed
from shared.messages.worker import SequenceWork

STEPS_PER_STAGE = 2
"""Steps in flight for each stage before their tokens are awaited though no plan goes on with them."""


class _Step(NamedTuple):
    number: int
    batch: Batch
    tokens: ExpectedTokens


class ExpectedSteps:
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
        self._steps.append(_Step(self._number, batch, self._pipeline.expect_tokens(batch.drawn_at_most)))
        self._awaits.update(dict.fromkeys(batch.sampled, self._number))

    def release(self, sequence: SequenceId) -> None:
        """It has left the table: its token is nobody's, even if it comes back."""
        self._awaits.pop(sequence, None)

    def receive_for(self, work: tuple[SequenceWork, ...]) -> None:
        """Waits until the tokens are there that `work` goes on with."""
        needed = max((self._awaits.get(item.sequence, 0) for item in work), default=0)
        while self._steps and (self._steps[0].number <= needed or len(self._steps) > self._most):
            self._receive_oldest()

    def receive_all(self) -> None:
        """Waits until the tokens of all steps are there."""
        while self._steps:
            self._receive_oldest()

    @property
    def _most(self) -> int:
        return STEPS_PER_STAGE * self._pipeline.stages

    def _receive_oldest(self) -> None:
        number, batch, expected = self._steps.popleft()
        tokens = np.array(expected.wait(), dtype=np.int32).reshape(len(batch.sampled), -1)
        awaits = self._awaits
        rows = [row for row, sequence in enumerate(batch.sampled) if awaits.get(sequence) == number]
        for row in rows:
            del awaits[batch.sampled[row]]
        seq_indices, drawn = batch.sampled_indices[rows], tokens[rows]
        drafts = self._sequences.drafts(seq_indices, drawn.shape[1] - 1)
        self._sequences.append(seq_indices, 1 + accepted_counts(drawn, drafts, batch.drafted[rows]), drawn)


class StepMarks(NamedTuple):
    """Moments in the device's work on a step."""

    begun: Mark
    forwarded: Mark
    over: Mark
    """Behind the copies of what it drew."""


@dataclass(frozen=True, slots=True)
class LaunchedBatch:
    """A batch that the device has been given. Nothing that it holds is written to any more, but by the device, before
    `marks.over`."""

    batch: Batch
    drawn: SamplerOutput
    """On its way to the host; its tokens are what `AcceptedTokens.of` reads."""
    scored: ScoredPromptRows
    """On its way to the host."""
    vectors: PooledVectors
    """On its way to the host."""
    generations: NDArray[np.int64]
    """[Q] whose indices they were; see `SequenceTable.generations`."""
    marks: StepMarks
    trial: VerifiedDrafts | None
    """None where nobody has drafts: it is known then how long its sequences are behind it."""
    failed: tuple[SequenceFailed, ...] = ()
    """Sequences whose grammar is followed no longer."""

    def verdict(self) -> AcceptedTokens:
        """Waits until the device is done."""
        self.marks.over.wait()
        return AcceptedTokens.of(self.drawn.tokens.numpy().astype(np.int32), self.batch.drafted, self.drawn.logprobs)


_MAX_PENDING = 2 * MAX_LAUNCHED_STEPS
"""Steps that are finished some time after they are over, when somebody needs what they drew; older ones are at once."""


class _PendingStep(NamedTuple):
    step: LaunchedBatch
    places: Int32s
    """[Q] the position of each first token drawn, as far as that is known."""


class PendingSteps:
    """Owns the batches that the device has been given. Finishing one waits until the device is done with it."""

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        self._steps: deque[_PendingStep] = deque()

    def clear(self) -> None:
        """Nobody wants to know any more."""
        self._steps.clear()

    def add(self, step: LaunchedBatch, places: Int32s) -> None:
        """`places` [Q]: see `SequenceTable.assume`."""
        self._steps.append(_PendingStep(step, places))
        while len(self._steps) > _MAX_PENDING:
            self._finish_oldest()

    @property
    def latest(self) -> LaunchedBatch | None:
        """The step that was begun last; None where it is finished."""
        return self._steps[-1].step if self._steps else None

    def finish_all(self) -> None:
        """Waits until the device is done with all steps."""
        while self._steps:
            self._finish_oldest()

    def finish_drafts(self, *, but_latest: bool) -> None:
        """Until it is known how many drafts stand: of all steps, or of all but the latest, whose `rejected` the next
        one is moved back by."""
        steps = list(self._steps)[: len(self._steps) - but_latest]
        self._finish(max((place + 1 for place, each in enumerate(steps) if each.step.trial is not None), default=0))

    def finish_for(self, seq_indices: Indices) -> None:
        """Until all is known that was drawn for `seq_indices`."""
        needed = [np.isin(seq_indices, each.step.batch.sampled_indices).any() for each in self._steps]
        self._finish(max((place + 1 for place, need in enumerate(needed) if need), default=0))

    def rejected(self, seq_indices: Indices) -> RejectedDrafts | None:
        """The drafts of `seq_indices` [P] that the latest step rejects; None if their lengths are already known."""
        latest = self.latest
        if latest is None or latest.trial is None:
            return None
        sequences, drafting = self._rank.sequences, latest.batch.sampled_indices
        place = np.full(len(sequences.lengths), len(drafting))
        theirs = np.flatnonzero(sequences.generations[drafting] == latest.generations)
        place[drafting[theirs]] = theirs
        return latest.trial.rejected().of(to_device(place[seq_indices], self._rank.device))

    def _finish(self, steps: int) -> None:
        for _ in range(steps):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        step, places = self._steps.popleft()
        verdict, batch, rank = step.verdict(), step.batch, self._rank
        there = np.flatnonzero(rank.sequences.generations[batch.sampled_indices] == step.generations)
        seq_indices, counts, tokens = batch.sampled_indices[there], verdict.counts[there], verdict.tokens[there]
        rank.sequences.fill_all(seq_indices, places[there], counts, tokens)
        if step.trial is not None:
            self._shorten(seq_indices, 1 + batch.drafted[there] - counts)
        if rank.guided is not None:
            rank.guided.accept(seq_indices, counts, tokens)

    def _shorten(self, seq_indices: Indices, tokens: Int32s) -> None:
        """What lies behind drafts that do not stand was taken to lie further on."""
        sequences = self._rank.sequences
        sequences.shorten(seq_indices, tokens)
        missing = np.zeros_like(sequences.lengths)
        missing[seq_indices] = tokens
        for later in self._steps:
            later.places[:] -= missing[later.step.batch.sampled_indices]
