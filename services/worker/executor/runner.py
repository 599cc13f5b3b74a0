"""What takes one rank's plans through their three phases, whatever the device: prepare, launch, result.

Two runners differ in where the drawn tokens are that the next step goes on with: in main memory (`host_runner`), or on
the device (`device_runner`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from services.worker.backend import ExecutionMode, Step, StepOutput
from services.worker.batch.batch import Batch
from services.worker.batch.prompt_rows import ScoredPromptRows
from services.worker.executor.rank_state import RankState
from services.worker.kv.copier import RankKvCache
from services.worker.sampling.history import HistoryLookup
from services.worker.sampling.parameters import SamplingBatch
from services.worker.sampling.sampler import SamplerOutput, sample, undefined_rows
from services.worker.speculation.verification import AcceptedTokens
from shared.messages.scheduler import SampledTokens, SequenceFailed, StepTiming
from shared.messages.worker import StepPlan

UNDEFINED = "the model computed NaN"


class StepRunner:
    """See :class:`services.worker.backend.Backend`: what all runners of a rank have in common."""

    mode: ExecutionMode

    def __init__(self, rank: RankState) -> None:
        self.rank = rank
        self.card = rank.card
        """The card of the model that is served."""
        self.num_blocks = rank.num_blocks
        self.device = str(rank.device)
        """PyTorch's name of it: "cpu", "cuda:1"."""
        self.kv: RankKvCache = rank.kv
        self.grammars = rank.grammars
        self.max_speculate = rank.drafting.settings.max_tokens
        self.max_jump_ahead = rank.drafting.max_jump_ahead

    def compute_context(self) -> AbstractContextManager[object]:
        """Gradients are needed by nobody."""
        return torch.inference_mode()

    def prepare(self, plan: StepPlan) -> Step:
        """See :meth:`services.worker.backend.Backend.prepare`."""
        raise NotImplementedError

    def sample(
        self, batch: Batch, logits: Tensor | None, choices: SamplingBatch | None, history: HistoryLookup
    ) -> SamplerOutput:
        """A token for each row of `batch` that is drawn from: the same on all ranks, of which one has the logits."""
        communicator = self.rank.communicator
        if choices is None or logits is None:
            drawn = SamplerOutput(torch.empty(len(batch.drawn_rows), dtype=torch.int64, device=self.rank.device))
        else:
            drawn = sample(logits, choices, history)
            drawn = replace(drawn, undefined=undefined_rows(logits, drawn.tokens))
        if choices is None or communicator.world_size == 1:
            return drawn
        return replace(drawn, tokens=communicator.broadcast(drawn.tokens))


def undefined_sequences(batch: Batch, undefined: Tensor | None) -> tuple[SequenceFailed, ...]:
    """The sequences of `batch` that drew from NaN; `undefined`: see `SamplerOutput`."""
    if undefined is None or not (rows := np.flatnonzero(undefined.cpu().numpy())).size:
        return ()
    owners = np.repeat(np.arange(len(batch.sampled)), batch.drafted + 1)
    return tuple(SequenceFailed(batch.sampled[owner], UNDEFINED, "nan") for owner in np.unique(owners[rows]))


def step_output(
    plan: StepPlan,
    timing: StepTiming,
    batch: Batch | None,
    verdict: AcceptedTokens | None,
    scored: ScoredPromptRows,
    failed: tuple[SequenceFailed, ...] = (),
) -> StepOutput:
    """The messages of what a step drew. `batch` None: there was nothing to compute. `verdict` None: on ranks that draw
    nothing."""
    if batch is None:
        return StepOutput(_complete(plan, ()), timing)
    drafted, prompts = int(batch.drafted.sum()), scored.messages() if scored.parts else ()
    if verdict is None:
        return StepOutput((), timing, drafted, (), prompts, failed)
    accepted = verdict.by_position(batch) if drafted else ()
    sampled = verdict.sampled(batch)
    if len(sampled) != sum(work.sample for work in plan.work):
        sampled = _complete(plan, sampled)
    return StepOutput(sampled, timing, drafted, accepted, prompts, failed)


def _complete(plan: StepPlan, sampled: tuple[SampledTokens, ...]) -> tuple[SampledTokens, ...]:
    """An entry for each work that wanted one: those whose context was full drew nothing."""
    by_sequence = {one.sequence: one for one in sampled}
    return tuple(
        by_sequence.get(work.sequence) or SampledTokens(work.sequence, ()) for work in plan.work if work.sample
    )
