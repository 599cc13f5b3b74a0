"""The backend for a device that works by itself: a step is launched while the one before is computed.

What a step draws stays on the device, where the next step's rows are read from; the host follows. It counts a token as
known when it is being drawn, and waits for what was drawn only where it cannot go on without:

- how many drafts stand decides how long sequences are. It is found on the device (`Ops.verify`), and the next step is
  prepared as if all did, and moved back there by what is missing (`shortfall.py`). Where more than positions follows
  from it, or whoever drafts reads what sequences hold, the host waits;
- a grammar's mask follows from the token before: it is made when that has come, beside the forward pass.

On a CPU all this works the same way, but that a step is over when it is begun.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.worker.backend import StepOutput, StepUnderWay
from services.worker.batch import Batch, Shares
from services.worker.drawn_step import DrawnStep
from services.worker.launched_step import LaunchedStep, Marks
from services.worker.ops import BatchMeta
from services.worker.rank import Rank, RankBackend, apart
from services.worker.sampling.parameters import Choices, Feature
from services.worker.sampling.prompt_rows import ScoredRows
from services.worker.sampling.sampler import Drawn, sample
from services.worker.shortfall import Shortfall, move_back, move_back_once
from services.worker.speculation.proposer import Drafts
from services.worker.speculation.trial import Trial, drawn_behind, try_once
from services.worker.step_clock import Mark, clock_of
from services.worker.token_table import TokenTable
from services.worker.unsettled import UnsettledSteps
from shared.messages.scheduler import StepTiming
from shared.messages.worker import StepPlan

_OF_HISTORIES = Feature.PENALTIES | Feature.BAD_WORDS | Feature.THINKING
"""What reads as much of a sequence as the host takes it to have."""


class LaunchingRunner(RankBackend):
    """See :class:`services.worker.backend.LaunchingBackend`. For engines of one stage."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        if rank.pipeline.stages > 1:
            raise ValueError("stages of a pipeline learn in main memory what was drawn")
        slots, width = rank.sequences.tokens.shape
        self._tokens = TokenTable(slots, width, rank.device)
        self._history = self._tokens.history(rank.sequences.prompt_lengths)
        self._clock = clock_of(rank.device)
        self._unsettled = UnsettledSteps(rank)
        try_once(rank.decoder.ops, rank.device)
        move_back_once(rank.device)

    def reset(self) -> None:
        self._unsettled.clear()
        self.rank.clear()

    def step(self, plan: StepPlan) -> StepOutput:
        return self.begin(plan).output()

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> StepUnderWay:
        goes_ahead = self.rank.goes_ahead(plan)
        self._unsettled.settle_drafts(but_latest=goes_ahead and self._can_be_moved_back())
        self._put(self.rank.take_over(plan))
        shares = self.rank.sequences.shares(plan.work) if plan.work else None
        if shares is None or not shares.work:
            return DrawnStep(plan, StepTiming(wait=0.0, prepare=0.0, forward=0.0, sample=0.0))
        if len(shares.speculating) and not goes_ahead:
            self._unsettled.settle_all()
        return self._launch(plan, self.rank.sequences.batch(shares, self._proposed(shares)))

    def _can_be_moved_back(self) -> bool:
        """Whether nothing but positions follows from how many drafts of the latest step stand.

        Who planned the next step may know that already, and have given it no more blocks than it needs: then the step
        is over, and the host is to know it, too.
        """
        latest, sequences = self._unsettled.latest, self.rank.sequences
        if latest is None or latest.batch.choices is None or latest.marks.over.passed():
            return False
        choices = latest.batch.choices
        if choices.features & _OF_HISTORIES or not choices.table.settled(choices):
            return False
        return bool((sequences.lengths[choices.slots] < sequences.tokens.shape[1]).all())

    def _put(self, slots: list[int]) -> None:
        """What new sequences hold, to the device."""
        if not slots:
            return
        sequences = self.rank.sequences
        lengths = sequences.lengths[slots]
        owner = np.repeat(np.array(slots, dtype=np.intp), lengths)
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths.tolist()])
        self._tokens.put(self._tokens.cells(owner, positions), sequences.tokens[owner, positions])

    def _proposed(self, shares: Shares) -> Drafts | None:
        """In the tokens' table, too, behind what the sequences hold."""
        speculating = shares.slots[shares.speculating]
        if not len(speculating):
            return self.rank.proposed(shares)
        shortfall = self._unsettled.shortfall(speculating)
        drafts = self.rank.proposed(shares, shortfall)
        if drafts is not None:
            self._tokens.put_drafts(speculating, self.rank.sequences.lengths[speculating], drafts, shortfall)
        return drafts

    def _launch(self, plan: StepPlan, batch: Batch) -> LaunchedStep:
        """Rows are read on the device, and what is drawn is written there: the host need not know either."""
        rank, rows = self.rank, batch.rows
        cells = self._tokens.cells(rows.row_slots, rows.positions)
        placed, meta = rank.staging.place(rows._replace(ids=cells), batch.logits_rows)
        drawing = drawn_behind(batch, meta)
        if (shortfall := self._unsettled.shortfall(rows.row_slots)) is not None:
            move_back(placed, meta, shortfall)
            batch = _moved_back(batch, shortfall if drawing is None else shortfall.of(drawing))
        ids = self._tokens.read(placed)
        launched = self._launched(batch, ids, meta)
        # What is drawn behind a draft that does not stand lies behind the sequence's end then, where nobody reads.
        self._tokens.feed(placed, drawing, launched.drawn.tokens)
        trial = rank.tried(batch, ids, drawing, launched.drawn.tokens)
        last_rows = batch.drawn_rows if trial is None else trial.last_rows()
        rank.tell(batch, meta, launched.features, last_rows, lambda: self._tokens.read(placed + 1))
        step = self._step(plan, batch, launched, trial)
        self._unsettled.add(step, rank.sequences.assume(batch.sampled_slots, batch.drafted))
        return step

    def _launched(self, batch: Batch, ids: Tensor, meta: BatchMeta) -> _Launched:
        begun = self._clock.mark()
        logits, features = self.rank.forward(ids, meta)
        forwarded = self._clock.mark()
        choices = self._masked(batch)
        logits, scored = apart(batch, logits)
        return _Launched(features, self._drawn(batch, logits, choices), scored, begun, forwarded)

    def _masked(self, batch: Batch) -> Choices | None:
        guided = self.rank.guided
        if guided:
            self._unsettled.settle_for(guided.followed(batch.sampled_slots))
        return self.rank.masked(batch)

    def _drawn(self, batch: Batch, logits: Tensor | None, choices: Choices | None) -> Drawn:
        """The same tokens on all ranks."""
        if choices is None or logits is None:
            drawn = Drawn(torch.empty(len(batch.drawn_rows), dtype=torch.int64, device=self.rank.device))
        else:
            drawn = sample(logits, choices, self._history)
        if choices is None or self.rank.communicator.world_size == 1:
            return drawn
        return Drawn(self.rank.communicator.broadcast(drawn.tokens), drawn.told)

    def _step(self, plan: StepPlan, batch: Batch, launched: _Launched, trial: Trial | None) -> LaunchedStep:
        outcome = launched.drawn if trial is None else Drawn(trial.outcome, launched.drawn.told)
        drawn, scored = outcome.on_host(), launched.scored.on_host()
        return LaunchedStep(
            plan=plan,
            batch=batch,
            drawn=drawn,
            scored=scored,
            tenancies=self.rank.sequences.tenancies[batch.sampled_slots],
            marks=Marks(launched.begun, launched.forwarded, self._clock.mark()),
            trial=trial,
        )


def _moved_back(batch: Batch, shortfall: Shortfall) -> Batch:
    """Its draws, by their own [R]."""
    return batch if batch.choices is None else replace(batch, choices=replace(batch.choices, shortfall=shortfall))


class _Launched(NamedTuple):
    """What a step comes to on the device."""

    features: Tensor | None
    drawn: Drawn
    scored: ScoredRows
    begun: Mark
    forwarded: Mark
