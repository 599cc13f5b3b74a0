"""The runner of a device that computes asynchronously: a step is launched while the device computes the one before.

Sampled tokens stay on the device, where the next step reads them; the host learns them later. The host counts a token
as known as soon as it is being sampled, and waits for its value only in two cases:

- Drafts: how many are accepted decides how long sequences are. The device finds that (`Ops.verify`). The next step is
  prepared as if all were accepted, and the device moves its rows back by what was rejected (`verification.py`).
  The host waits where more than positions depends on it, or where a drafter reads the tokens of sequences.
- Grammars: a mask depends on the token before. It is made when that token has arrived, beside the forward pass.

On a CPU the same code runs, but a step is finished when its launch returns.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from services.worker.backend import MAX_LAUNCHED_STEPS, ExecutionMode, StepOutput
from services.worker.batch.batch import NO_COPIES, Batch, DraftTokens, ScheduledWork
from services.worker.batch.pooled_rows import NO_VECTORS
from services.worker.batch.prompt_rows import ScoredPromptRows
from services.worker.batch.staging import STAGING_BUFFERS
from services.worker.executor.pending import LaunchedBatch, PendingSteps, StepMarks
from services.worker.executor.runner import (
    RankState,
    StepRunner,
    masked,
    split_logits,
    step_output,
    undefined_sequences,
)
from services.worker.executor.timing import clock_of
from services.worker.executor.token_table import TokenTable
from services.worker.sampling.parameters import Feature
from services.worker.sampling.random_numbers import RejectedDrafts
from services.worker.speculation.verification import move_back, sampled_rows, warm_up_move_back, warm_up_verification
from shared.messages.scheduler import StepTiming
from shared.messages.worker import StepPlan

_OF_HISTORIES = Feature.PENALTIES | Feature.BAD_WORDS | Feature.THINKING
"""Features that read the tokens of a sequence on the host."""


class DeviceRunner(StepRunner):
    """See the module, and :class:`services.worker.backend.Backend`. For engines of one stage."""

    mode: ExecutionMode = "launched"

    def __init__(self, rank: RankState) -> None:
        super().__init__(rank)
        if rank.pipeline.stages > 1:
            raise ValueError("stages of a pipeline learn in main memory what was drawn")
        assert MAX_LAUNCHED_STEPS <= STAGING_BUFFERS, "the rows of each step under way have a buffer of their own"
        rows, width = rank.sequences.tokens.shape
        self._tokens = TokenTable(rows, width, rank.device)
        self._history = self._tokens.history(rank.sequences.prompt_lengths)
        self._clock = clock_of(rank.platform)
        self._pending = PendingSteps(rank)
        warm_up_verification(rank.decoder.ops, rank.device)
        warm_up_move_back(rank.device, rank.card.block_size)

    def reset(self) -> None:
        """Forgets every sequence; no step is under way, or nobody wants to know what it draws."""
        self._pending.clear()
        self.rank.begin_epoch()

    def prepare(self, plan: StepPlan) -> DeviceStep:
        """Waits for steps under way only where the host cannot go on without knowing what they draw."""
        self.rank.steps += 1
        goes_ahead = self.rank.drafting.goes_ahead(plan)
        self._pending.finish_drafts(but_latest=goes_ahead and self._can_be_moved_back())
        self._put(self.rank.update_sequences(plan))
        scheduled = self.rank.sequences.scheduled(plan.work) if plan.work else None
        if scheduled is None or not scheduled.work:
            return DeviceStep(self, plan, None)
        if len(scheduled.speculating) and not goes_ahead:
            self._pending.finish_all()
        batch = self.rank.sequences.batch(scheduled, self._proposed(scheduled))
        copies = self.rank.sequences.state_copies(plan)
        return DeviceStep(self, plan, batch if copies is NO_COPIES else replace(batch, copies=copies))

    def _can_be_moved_back(self) -> bool:
        """Whether nothing but positions follows from how many drafts of the latest step stand.

        Who planned the next step may know that already, and have given it no more blocks than it needs: then the step
        is over, and the host is to know it, too.
        """
        latest, sequences = self._pending.latest, self.rank.sequences
        if latest is None or latest.batch.choices is None or latest.marks.over.passed():
            return False
        choices = latest.batch.choices
        if choices.features & _OF_HISTORIES or not choices.table.position_independent(choices):
            return False
        return bool((sequences.lengths[choices.seq_indices] < sequences.tokens.shape[1]).all())

    def _put(self, seq_indices: list[int]) -> None:
        """Copies the tokens of new sequences to the device."""
        if not seq_indices:
            return
        sequences = self.rank.sequences
        lengths = sequences.lengths[seq_indices]
        owner = np.repeat(np.array(seq_indices, dtype=np.intp), lengths)
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths.tolist()])
        self._tokens.put(self._tokens.cells(owner, positions), sequences.tokens[owner, positions])

    def _proposed(self, scheduled: ScheduledWork) -> DraftTokens | None:
        """In the tokens' table, too, behind what the sequences hold."""
        speculating = scheduled.seq_indices[scheduled.speculating]
        if not len(speculating):
            return self.rank.drafting.propose(scheduled)
        rejected = self._pending.rejected(speculating)
        drafts = self.rank.drafting.propose(scheduled, rejected)
        if drafts is not None:
            self._tokens.put_drafts(speculating, self.rank.sequences.lengths[speculating], drafts, rejected)
        return drafts

    def launch(self, step: DeviceStep, batch: Batch) -> None:
        """Rows are read on the device, and what is drawn is written there: the host need not know either."""
        rank, rows = self.rank, batch.rows
        cells = self._tokens.cells(rows.seq_indices, rows.positions)
        placed, meta = rank.staging.place(rows._replace(ids=cells), batch.logits_rows)
        drawing = sampled_rows(batch, meta)
        if (rejected := self._pending.rejected(rows.seq_indices)) is not None:
            move_back(placed, meta, rejected)
            batch = _moved_back(batch, rejected if drawing is None else rejected.of(drawing))
        ids = self._tokens.read(placed)
        begun = self._clock.mark()
        logits, features = rank.forward(ids, meta, batch)
        forwarded = self._clock.mark()
        choices = batch.choices
        if rank.guided:
            self._pending.finish_for(batch.sampled_indices[rank.guided.with_grammar(batch.sampled_indices)])
            rank.request_masks(rank.guided, batch)
            choices = masked(rank.guided, choices)
        logits, scored = split_logits(batch, logits, self.find_logprobs)
        vectors = NO_VECTORS
        if batch.pooled.spans and features is not None:
            vectors = batch.pooled.vectors(features).on_host()
        drawn = self.sample(batch, logits, choices, self._history)
        # What is drawn behind a draft that is not accepted lies behind the sequence's end then, where nobody reads.
        self._tokens.feed(placed, drawing, drawn.tokens)
        trial = rank.verified(batch, ids, drawing, drawn.tokens)
        last_rows = batch.drawn_rows if trial is None else trial.last_rows()
        rank.drafting.observe(batch, meta, features, last_rows, lambda: self._tokens.read(placed + 1))
        outcome = drawn if trial is None else replace(drawn, tokens=trial.outcome)
        step.launched = LaunchedBatch(
            batch=batch,
            drawn=outcome.on_host(),
            scored=scored.on_host(),
            vectors=vectors,
            generations=rank.sequences.generations[batch.sampled_indices],
            marks=StepMarks(begun, forwarded, self._clock.mark()),
            trial=trial,
            failed=rank.take_failed(),
        )
        self._pending.add(step.launched, rank.sequences.assume(batch.sampled_indices, batch.drafted))


def _moved_back(batch: Batch, rejected: RejectedDrafts) -> Batch:
    """Its draws, by their own [R]."""
    return batch if batch.choices is None else replace(batch, choices=replace(batch.choices, rejected=rejected))


class DeviceStep:
    """The `Step` of a device that is launched ahead."""

    def __init__(self, runner: DeviceRunner, plan: StepPlan, batch: Batch | None) -> None:
        """`batch` None: there is nothing to compute."""
        self.plan = plan
        self.batch = batch
        self.launched: LaunchedBatch | None = None
        """None until it is launched, or where there is nothing to compute."""
        self._runner = runner

    def launch(self) -> None:
        """Waits for nothing but tokens that a grammar follows."""
        if self.batch is not None:
            self._runner.launch(self, self.batch)

    def result(self) -> StepOutput:
        """Waits until the device is done with it."""
        launched = self.launched
        if launched is None:
            no_time = StepTiming(wait=0.0, prepare=0.0, forward=0.0, sample=0.0)
            return step_output(self.plan, no_time, None, None, ScoredPromptRows())
        verdict, marks = launched.verdict(), launched.marks
        timing = StepTiming(
            wait=0.0,
            prepare=0.0,  # the caller knows how much of it held the device up
            forward=marks.forwarded.seconds_since(marks.begun),
            sample=marks.over.seconds_since(marks.forwarded),
        )
        failed = launched.failed + undefined_sequences(launched.batch, launched.drawn.undefined)
        output = step_output(self.plan, timing, launched.batch, verdict, launched.scored, failed, launched.vectors)
        return msgspec.structs.replace(output, ended=marks.over.when(), began=marks.begun.when())
