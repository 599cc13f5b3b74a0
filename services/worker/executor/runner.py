"""What takes one rank's plans through their three phases, whatever the device: prepare, launch, result.

Two runners differ in where the drawn tokens are that the next step goes on with: in main memory (`host_runner`), or on
the device (`device_runner`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from services.worker.backend import ExecutionMode, Step, StepOutput
from services.worker.batch.batch import Batch
from services.worker.batch.prompt_rows import ScoredPromptRows
from services.worker.executor.rank_state import RankState
from services.worker.guided.library import GrammarLibrary
from services.worker.kv.copier import RankKvCache
from services.worker.speculation.verification import AcceptedTokens
from shared.messages.lifecycle import ModelCard
from shared.messages.scheduler import SampledTokens, StepTiming
from shared.messages.worker import StepPlan


class StepRunner:
    """See :class:`services.worker.backend.Backend`: what all runners of a rank answer alike."""

    mode: ExecutionMode

    def __init__(self, rank: RankState) -> None:
        self.rank = rank

    @property
    def card(self) -> ModelCard:
        """What is served."""
        return self.rank.card

    @property
    def num_blocks(self) -> int:
        """Blocks of KV memory."""
        return self.rank.num_blocks

    @property
    def device(self) -> str:
        """PyTorch's name of it: "cpu", "cuda:1"."""
        return str(self.rank.device)

    @property
    def kv(self) -> RankKvCache:
        """Its KV memory, for copying blocks beside steps."""
        return self.rank.kv

    @property
    def grammars(self) -> GrammarLibrary | None:
        """Where grammars are compiled; None on ranks that draw nothing."""
        return self.rank.grammars

    @property
    def max_speculate(self) -> int:
        """Drafts that one step may verify for a sequence."""
        return self.rank.drafting.max_tokens

    @property
    def max_jump_ahead(self) -> int:
        """Forced tokens that one step may yield for a sequence with a grammar."""
        return self.rank.max_jump_ahead

    def compute_context(self) -> AbstractContextManager[object]:
        """Gradients are needed by nobody."""
        return torch.inference_mode()

    def prepare(self, plan: StepPlan) -> Step:
        """See :meth:`services.worker.backend.Backend.prepare`."""
        raise NotImplementedError

    def begin(self, plan: StepPlan) -> Step:
        """Prepares and launches a step on this thread."""
        with torch.inference_mode():
            step = self.prepare(plan)
            step.launch()
        return step

    def step(self, plan: StepPlan) -> StepOutput:
        """Takes a plan through all three phases on this thread."""
        return self.begin(plan).result()


def step_output(
    plan: StepPlan, timing: StepTiming, batch: Batch | None, verdict: AcceptedTokens | None, scored: ScoredPromptRows
) -> StepOutput:
    """The messages of what a step drew. `batch` None: there was nothing to compute. `verdict` None: on ranks that draw
    nothing."""
    if batch is None:
        return StepOutput(_complete(plan, ()), timing)
    drafted, prompts = int(batch.drafted.sum()), scored.messages() if scored.parts else ()
    if verdict is None:
        return StepOutput((), timing, drafted, (), prompts)
    accepted = verdict.by_position(batch) if drafted else ()
    sampled = verdict.sampled(batch)
    if len(sampled) != sum(work.sample for work in plan.work):
        sampled = _complete(plan, sampled)
    return StepOutput(sampled, timing, drafted, accepted, prompts)


def _complete(plan: StepPlan, sampled: tuple[SampledTokens, ...]) -> tuple[SampledTokens, ...]:
    """An entry for each work that wanted one: those whose context was full drew nothing."""
    by_sequence = {one.sequence: one for one in sampled}
    return tuple(
        by_sequence.get(work.sequence) or SampledTokens(work.sequence, ()) for work in plan.work if work.sample
    )
