"""The backend that computes step by step: each is over, and its tokens known, before the next is begun."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from services.worker.backend import StepOutput
from services.worker.batch import Batch
from services.worker.drawn_step import DrawnBatch, DrawnStep
from services.worker.ops import BatchMeta
from services.worker.outstanding import OutstandingTokens
from services.worker.rank import Rank, RankBackend, apart
from services.worker.sampling.parameters import Choices
from services.worker.sampling.sampler import Drawn, sample
from services.worker.speculation.trial import drawn_behind
from services.worker.speculation.verdict import NOTHING_DRAWN, Verdict
from shared.messages.scheduler import StepTiming
from shared.messages.worker import StepPlan


class ModelRunner(RankBackend):
    """See :class:`services.worker.backend.DeferringBackend`. For CPUs, and for the stages of a pipeline, which learn in
    main memory what was drawn."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self._outstanding = OutstandingTokens(rank.pipeline, rank.sequences)

    def reset(self) -> None:
        self._outstanding.settle_all()
        self.rank.clear()

    def step(self, plan: StepPlan) -> StepOutput:
        return self.compute(plan).output()

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> DrawnStep:
        begun = time.perf_counter()
        rank = self.rank
        for sequence in plan.released:
            self._outstanding.release(sequence)
        rank.take_over(plan)
        if not plan.work:
            return DrawnStep(plan, _timing(begun, *[time.perf_counter()] * 3))
        self._outstanding.settle(plan.work)
        shares = rank.sequences.shares(plan.work)
        if not shares.work:
            return DrawnStep(plan, _timing(begun, *[time.perf_counter()] * 3))
        batch = rank.sequences.batch(shares, rank.drafts(shares))
        ids, meta = rank.staging.place(batch.rows, batch.logits_rows)
        prepared = time.perf_counter()
        logits, features = rank.forward(ids, meta)
        choices = rank.masked(batch)
        self._wait_for_device()
        forwarded = time.perf_counter()
        logits, scored = apart(batch, logits)
        verdict = self._drawn(batch, ids, meta, logits, choices)
        if rank.tells:
            rank.tell(batch, meta, features, batch.last_rows(verdict.counts))
        timing = _timing(begun, prepared, forwarded, time.perf_counter(), rank.pipeline.take_waited())
        return DrawnStep(plan, timing, DrawnBatch(batch, verdict if rank.draws else None, scored))

    def _drawn(
        self, batch: Batch, ids: Tensor, meta: BatchMeta, logits: Tensor | None, choices: Choices | None
    ) -> Verdict:
        """The next tokens of each sequence that asked for some; they are appended to the sequences."""
        rank = self.rank
        if choices is None:
            return NOTHING_DRAWN
        if not rank.draws:
            self._outstanding.expect(batch)
            return NOTHING_DRAWN
        if logits is not None:
            drawn = sample(logits, choices, rank.sequences.history)
        else:
            drawn = Drawn(torch.zeros(len(batch.drawn_rows), dtype=torch.int64, device=rank.device))
        outcome = rank.communicator.broadcast(drawn.tokens)
        tried = rank.tried(batch, ids, drawn_behind(batch, meta), outcome)
        if tried is not None:
            outcome = tried.outcome
        verdict = Verdict.of(outcome.cpu().numpy().astype(np.int32), batch.drafted, drawn.told)
        rank.pipeline.tell(verdict.tokens.ravel().tolist())
        rank.sequences.append(batch.sampled_slots, verdict.counts, verdict.tokens)
        if rank.guided is not None:
            rank.guided.take(batch.sampled_slots, verdict.counts, verdict.tokens)
        return verdict

    def _wait_for_device(self) -> None:
        if self.rank.device.type == "cuda":
            torch.cuda.synchronize(self.rank.device)


def _timing(begun: float, prepared: float, forwarded: float, sampled: float, waited: float = 0.0) -> StepTiming:
    """`waited`: of the forward pass, for the stage before."""
    forward = forwarded - prepared - waited
    return StepTiming(wait=waited, prepare=prepared - begun, forward=forward, sample=sampled - forwarded)
