"""A profile of engines that serve, from what their workers report: seconds per step and per token of a step."""

from __future__ import annotations

from math import ceil

from services.planner.core.profile import EngineProfile
from shared.ids import InstanceId
from shared.messages.lifecycle import EngineReport, StepSums, WorkerReport

MIN_STEPS = 50
"""Steps before which nothing is known."""
ASSUMED_BATCH_TOKENS = 2048
"""Of a step, where the worker sets no limit: the scheduler's default."""
PROMPT_LENGTHS = (16, 128, 512, 2048, 8192, 32768, 131072)
CONTEXT_LENGTHS = (16, 131072)
MIN_DETERMINANT = 1e-6
"""Of the normal equations, relative to what it could be: below, all steps were alike, and a token's part in them does
not show."""


class LiveProfile:
    """Owns the sums of a least-squares fit over the intervals between reports of first ranks: an interval's seconds are
    its steps times a, and its tokens times b.

    Decode steps and prompts are told apart by nothing but their tokens, so the length of contexts has no part in it;
    what that makes wrong, the correction factors show.
    """

    def __init__(self) -> None:
        self.steps = 0
        """Steps seen so far."""
        self._reports: dict[InstanceId, StepSums] = {}
        self._steps_steps = self._steps_tokens = self._tokens_tokens = 0.0
        self._steps_seconds = self._tokens_seconds = 0.0

    def record(self, instance: InstanceId, worker: WorkerReport) -> None:
        """A report of a rank. The first one of a process only begins an interval."""
        if worker.rank:
            return
        sums, before = worker.sums, self._reports.get(instance)
        self._reports[instance] = sums
        if before is None or sums.steps <= before.steps or sums.computed < before.computed:
            return
        steps, tokens = sums.steps - before.steps, sums.computed - before.computed
        seconds = _computing(sums) - _computing(before)
        self.steps += steps
        self._steps_steps += steps * steps
        self._steps_tokens += steps * tokens
        self._tokens_tokens += tokens * tokens
        self._steps_seconds += steps * seconds
        self._tokens_seconds += tokens * seconds

    def forget(self, instance: InstanceId) -> None:
        """The process is gone; what was learnt from it stays."""
        self._reports.pop(instance, None)

    def profile(self, engine: EngineReport, worker: WorkerReport) -> EngineProfile | None:
        """Of an engine with such reports; None before enough was seen."""
        if self.steps < MIN_STEPS:
            return None
        step, token = self._fitted()
        batch_tokens = worker.max_batch_tokens or ASSUMED_BATCH_TOKENS
        batches = (1, max(2, engine.max_running))
        return EngineProfile(
            model=engine.model.name,
            device=worker.device,
            gpus=worker.world_size,
            max_num_seqs=engine.max_running,
            max_batch_tokens=batch_tokens,
            kv_tokens=engine.blocks_total * engine.model.block_size,
            prompt_lengths=PROMPT_LENGTHS,
            prefill_seconds=tuple(ceil(each / batch_tokens) * step + each * token for each in PROMPT_LENGTHS),
            batch_sizes=batches,
            context_lengths=CONTEXT_LENGTHS,
            itl_seconds=tuple((step + batch * token,) * len(CONTEXT_LENGTHS) for batch in batches),
            source="live",
        )

    def _fitted(self) -> tuple[float, float]:
        """Seconds per step and per token, neither of them negative."""
        determinant = self._steps_steps * self._tokens_tokens - self._steps_tokens**2
        if determinant > MIN_DETERMINANT * self._steps_steps * self._tokens_tokens:
            step = (self._steps_seconds * self._tokens_tokens - self._tokens_seconds * self._steps_tokens) / determinant
            token = (self._tokens_seconds * self._steps_steps - self._steps_seconds * self._steps_tokens) / determinant
            if step >= 0 and token >= 0:
                return step, token
            if step < 0:
                return 0.0, self._tokens_seconds / self._tokens_tokens
        return self._steps_seconds / self._steps_steps, 0.0


def _computing(sums: StepSums) -> float:
    return sums.prepare + sums.forward + sums.sample
