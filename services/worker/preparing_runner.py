"""The backend that computes on processors: one thread computes, and the next step is prepared beside it.

A step is prepared while the tokens are being drawn that it goes on with: it needs their number, and reads them when its
turn comes. Where it needs more than that it waits until all before it is computed:

- whoever drafts, and a grammar that forces tokens, reads what sequences hold: such a step is prepared where it is
  computed, in its turn; and how many drafts stand decides how long sequences are behind it;
- a sequence that leaves gives its slot up only when nobody draws for it any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from services.worker.backend import PreparedStep, StepOutput
from services.worker.batch import Batch
from services.worker.drawn_step import DrawnBatch, DrawnStep
from services.worker.ops import BatchMeta
from services.worker.rank import Rank, RankBackend, apart
from services.worker.rows import Int32s
from services.worker.rows_on_device import where_they_are
from services.worker.sampling.sampler import sample
from services.worker.speculation.trial import drawn_behind
from services.worker.speculation.verdict import NOTHING_DRAWN, Verdict
from services.worker.steady_decodes import SteadyDecodes
from shared.messages.scheduler import StepTiming
from shared.messages.worker import StepPlan

_NO_TIME = StepTiming(wait=0.0, prepare=0.0, forward=0.0, sample=0.0)


class _Prepared(NamedTuple):
    """A step that is ready to be computed."""

    batch: Batch
    ids: Tensor
    meta: BatchMeta
    places: Int32s | None
    """[Q] where what is drawn belongs; None where only what stands of the drafts says that."""


class PreparingRunner(RankBackend):
    """See :class:`services.worker.backend.PreparingBackend`. For a rank that computes alone."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        if rank.device.type != "cpu" or rank.pipeline.stages > 1 or rank.communicator.world_size > 1:
            raise ValueError("several ranks go step by step, and a device of its own is launched")
        self._steady = SteadyDecodes(rank.sequences)
        self._latest: StepBeside | None = None
        """None: nothing is under way."""

    def reset(self) -> None:
        self.settle()
        self._steady.forget()
        self.rank.clear()

    def step(self, plan: StepPlan) -> StepOutput:
        return self.compute(plan).output()

    def compute(self, plan: StepPlan) -> PreparedStep:
        """See :class:`services.worker.backend.DeferringBackend`."""
        step = self.prepare(plan)
        with self.computing():
            step.compute()
        return step

    # ---- on the thread that prepares

    def prepare(self, plan: StepPlan) -> StepBeside:
        if any(work.speculate for work in plan.work):
            return self._under_way(StepBeside(lambda: self._in_turn(plan), lengths_known=False))
        if not self._goes_on(plan):
            self.settle()
        prepared = self._prepared(plan)
        return self._under_way(StepBeside(lambda: self._computed(plan, prepared)))

    def _prepared(self, plan: StepPlan) -> _Prepared | None:
        """None where there is nothing to compute."""
        rank = self.rank
        rank.take_over(plan)
        batch = None if plan.released or plan.new else self._steady.next(plan.work)
        if batch is not None:
            rank.nobody_drafts()
        elif (batch := self._batch(plan)) is None:
            return None
        ids, meta = where_they_are(batch.rows, batch.logits_rows)
        places = None if batch.drafted.any() else rank.sequences.advance(batch.sampled_slots)
        return _Prepared(batch, ids, meta, places)

    def _batch(self, plan: StepPlan) -> Batch | None:
        """Of any plan; None where there is nothing to compute."""
        rank = self.rank
        self._steady.forget()
        shares = rank.sequences.shares(plan.work) if plan.work else None
        if shares is None or not shares.work:
            return None
        batch = rank.sequences.batch(shares, rank.drafts(shares))
        self._steady.note(plan.work, batch)
        return batch

    def _under_way(self, step: StepBeside) -> StepBeside:
        self._latest = step
        return step

    def _goes_on(self, plan: StepPlan) -> bool:
        """Whether the plan needs no more of the steps under way than how many tokens they draw."""
        latest = self._latest
        if latest is None or latest.over:
            return True
        return latest.lengths_known and not plan.released

    def settle(self) -> None:
        if self._latest is not None:
            self._latest.wait()
            self._latest = None

    # ---- on the thread that computes

    def computing(self) -> AbstractContextManager[object]:
        return torch.inference_mode()

    def _in_turn(self, plan: StepPlan) -> DrawnStep:
        """A step that could not be prepared before."""
        begun = time.perf_counter()
        prepared = self._prepared(plan)
        prepare = time.perf_counter() - begun
        step = self._computed(plan, prepared)
        return replace(step, timing=msgspec.structs.replace(step.timing, prepare=prepare))

    def _computed(self, plan: StepPlan, prepared: _Prepared | None) -> DrawnStep:
        if prepared is None:
            return DrawnStep(plan, _NO_TIME)
        begun = time.perf_counter()
        batch, ids, meta, _ = prepared
        rows = batch.rows
        np.copyto(rows.ids, self.rank.sequences.tokens[rows.row_slots, rows.positions])
        logits, features = self.rank.forward(ids, meta)
        forwarded = time.perf_counter()
        logits, scored = apart(batch, logits)
        verdict = self._drawn(prepared, logits)
        if self.rank.tells:
            self.rank.tell(batch, meta, features, batch.last_rows(verdict.counts))
        over = time.perf_counter()
        timing = StepTiming(wait=0.0, prepare=0.0, forward=forwarded - begun, sample=over - forwarded)
        return DrawnStep(plan, timing, DrawnBatch(batch, verdict, scored))

    def _drawn(self, prepared: _Prepared, logits: Tensor | None) -> Verdict:
        """The next tokens of each sequence that asked for some, which holds them from here on."""
        rank, (batch, ids, meta, places) = self.rank, prepared
        slots, choices = batch.sampled_slots, rank.masked(batch)
        if choices is None or logits is None:
            return NOTHING_DRAWN
        drawn = sample(logits, choices, rank.sequences.history)
        tried = None if places is not None else rank.tried(batch, ids, drawn_behind(batch, meta), drawn.tokens)
        outcome = drawn.tokens if tried is None else tried.outcome
        verdict = Verdict.of(outcome.numpy().astype(np.int32), batch.drafted, drawn.told)
        if places is None:
            rank.sequences.append(slots, verdict.counts, verdict.tokens)
        else:
            rank.sequences.fill(slots, places, verdict.tokens[:, 0])
        if rank.guided is not None:
            rank.guided.take(slots, verdict.counts, verdict.tokens)
        return verdict


class StepBeside:
    """See :class:`services.worker.backend.PreparedStep`."""

    def __init__(self, compute: Callable[[], DrawnStep], *, lengths_known: bool = True) -> None:
        """`lengths_known`: how long its sequences are behind it does not depend on what it draws."""
        self.lengths_known = lengths_known
        self._compute = compute
        self._outcome: DrawnStep | BaseException | None = None
        self._under_way = threading.Lock()
        """Held until it is computed."""
        self._under_way.acquire()

    @property
    def over(self) -> bool:
        return self._outcome is not None

    def compute(self) -> None:
        try:
            self._outcome = self._compute()
        except BaseException as error:
            self._outcome = error
            raise
        finally:
            self._under_way.release()

    def wait(self) -> DrawnStep:
        """Raises what computing raised."""
        with self._under_way:
            outcome = self._outcome
        assert outcome is not None, "it is computed"
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def output(self) -> StepOutput:
        return self.wait().output()
