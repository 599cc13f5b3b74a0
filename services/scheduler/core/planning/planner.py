"""Builds the next step: which sequences compute how many tokens in which blocks. Knows lengths, never token values.

One token budget a step. Decoding sequences first (`decode.py`), then the rest of chunked prefills and waiting sequences
(`prefill.py`), as far as the target for the time between tokens allows (`prefill_budget.py`); beside them, what is
copied to the KV store and what is compiled. A suspect of a death has steps of its own (`isolation.py`).
"""

from __future__ import annotations

from itertools import chain, islice

from services.scheduler.core.counters import EngineCounters
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.memory import BlockAllocator
from services.scheduler.core.planning.decode import DecodePlanner, MicroBatches, Preemption
from services.scheduler.core.planning.isolation import SuspectIsolation
from services.scheduler.core.planning.prefill import Admission, PrefillPlanner
from services.scheduler.core.planning.prefill_budget import PrefillBudget
from services.scheduler.core.planning.speculation import SpeculationBudget
from services.scheduler.core.planning.step_builder import StepBuilder
from services.scheduler.core.queue.grammars import Grammars
from services.scheduler.core.queue.sequence_queues import SequenceQueues
from services.scheduler.core.queue.shared_prompts import SharedPrompts
from services.scheduler.core.transfer.epoch_transfers import EpochTransfers
from services.scheduler.core.transfer.saves import MAX_BLOCKS, MAX_BLOCKS_BESIDE_DECODES


class StepPlanner:
    """Owns the prompts that sequences share, and the micro-batches; the planners of a step's parts own the rest."""

    def __init__(
        self,
        limits: EngineLimits,
        prefill_budget: PrefillBudget,
        memory: BlockAllocator,
        transfers: EpochTransfers,
        grammars: Grammars,
        speculation: SpeculationBudget,
        counters: EngineCounters,
    ) -> None:
        self._limits = limits
        self._prefill_budget = prefill_budget
        self._memory = memory
        self._copies = transfers.copies
        self._saves = transfers.saves
        self._grammars = grammars
        self._prompts = SharedPrompts(memory.share_at)
        self._micro_batches = MicroBatches(limits.stages) if limits.stages > 1 else None
        self.queues = SequenceQueues(memory, transfers.loads, grammars, self._prompts, limits.max_loras)
        self.preemption = Preemption(memory, self.queues, transfers.saves)
        self.decodes = DecodePlanner(memory, self.queues, self.preemption, speculation, self._micro_batches)
        self._prefills = PrefillPlanner(
            memory, self.queues, limits.max_batch_tokens, limits.long_prefill_token_threshold
        )
        self._admission = Admission(
            *(limits.max_running, memory, self.queues, transfers.loads, transfers.remote, self._prompts),
            *(self._prefills, counters),
        )
        self.isolation = SuspectIsolation(self.queues, self._admission, self._prefills, self.decodes)

    @property
    def waits_elsewhere(self) -> bool:
        """Whether a sequence goes on without any step's result: when the store has answered, or when the ranks have
        copied or compiled something."""
        sought = len(self.queues.seeking) > self._prompts.waiting
        return bool(sought or self.queues.handing or self._copies.in_flight or self._grammars.answers_awaited)

    def _prompts_left(self) -> tuple[int, int]:
        """Prompt tokens still to compute of the sequences that may soon be in a step: of all, and of the first.
        How much of a waiting prompt is cached is not known yet."""
        coming = islice(chain(self.queues.prefilling, self.queues.waiting), self._limits.max_running)
        left = [sequence.tokens.length - sequence.tokens.planned for sequence in coming]
        return sum(left), left[0]

    def plan(self, now: float, *, admits: bool = True) -> StepBuilder | None:
        """The next step, or None where there is nothing to compute, copy or compile before results come. `admits`:
        whether it may begin with waiting sequences."""
        step = StepBuilder(self._limits.max_batch_tokens, self._limits.max_new_bytes, self._memory.step_rows)
        queues, preempted = self.queues, self.preemption.count
        alone = self.isolation.current is not None
        if alone:
            self.isolation.plan(step)
        else:
            self.decodes.plan(step)
            step.decodes = step.samples
            if self._limits.has_prefill_targets and (queues.prefilling or queues.waiting):
                planned = self._limits.max_batch_tokens - step.budget
                step.limit(self._prefill_budget.chunk(planned, step.budget, *self._prompts_left()))
            reserved = self._prefills.reserve(step)
            if queues.prefilling:
                self._prefills.plan(step)
            held_back = queues.suspects and self.isolation.holds_back_admission
            # A sequence that was preempted just now is first in the queue; it would only be preempted again.
            if admits and queues.waiting and preempted == self.preemption.count and not held_back:
                self._admission.admit(step, now)
            if self._prefills.long_threshold:
                step.budget += reserved
                self._prefills.plan_long(step)
        for sequence in step.filled:  # blocks that the step fills are there for every plan behind it
            self._memory.index_full_blocks(sequence)
            for other in self._prompts.progress(sequence):
                queues.resume(other)
        if self._saves.ready and not alone:
            self._saves.plan(MAX_BLOCKS_BESIDE_DECODES if step.decodes else MAX_BLOCKS, now)
        if (self._grammars.unsent or self._grammars.resend) and not alone:
            step.grammars = self._grammars.take(step.new_bytes, now)
        idle = not (step.work or step.grammars.compile)
        if idle and not self._copies.any_planned and not self._memory.filled:
            return None
        if queues.suspects and not alone:
            self.isolation.record_step()
        if self._micro_batches is not None:
            self._micro_batches.record_plan(step.work, queues.by_id)
        return step
