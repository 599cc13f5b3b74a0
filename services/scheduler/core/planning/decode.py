"""The decodes of a step: one token for each sequence, drafts where they pay, and memory for both.

A step may yield several tokens of a sequence, so what is planned are upper bounds, with blocks for all of them. Results
say how much less it was (`results/step_results.py`): then lengths go back, and the blocks stay for the next steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.scheduler.core.memory import BlockAllocator
from services.scheduler.core.planning.speculation import SpeculationBudget
from services.scheduler.core.planning.step_builder import StepBuilder
from services.scheduler.core.queue.sequence_queues import SequenceQueues
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.transfer.saves import Saves
from shared.blocks import blocks_for
from shared.ids import SequenceId
from shared.messages.worker import SequenceWork
from shared.packing import pack


class Preemption:
    """Owns the count of sequences that lost their blocks to others. When memory runs out for a decoding sequence, it
    takes the blocks of the last sequence in the queues, which continues later.

    The KV cache of a preempted sequence is swapped out to the node's KV store, most of it in advance: full blocks are
    saved as they are computed. Blocks that are not there yet are saved at once, and are the last to be overwritten.
    When its turn comes again it loads them, if that takes less time than computing them (`Loads.decide`)."""

    def __init__(self, memory: BlockAllocator, queues: SequenceQueues, saves: Saves) -> None:
        self.count = 0
        self._memory = memory
        self._queues = queues
        self._saves = saves

    def make_room(self, sequence: Sequence) -> bool:
        """Frees a block from the end of the queues; False where that end was `sequence` itself.

        Everybody behind `sequence` is still without work in this step, because decodes are planned in the order of
        the queue and prefills after them: so nothing that is planned is taken back.
        """
        self._memory.reclaim(sequence)
        while self._memory.free_blocks == 0:
            ends = (self._queues.decoding.last, self._queues.prefilling.last)
            victim = max((end for end in ends if end is not None), key=lambda end: end.queue_key)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Takes all blocks of the sequence. It waits again when its token in flight (if any) is known."""
        self.count += 1
        sequence.transfer.preempt()
        unsaved = self._saves.hurry(self._memory.names(sequence))
        self._queues.release(sequence, last=unsaved)
        if sequence.tokens.in_flight:
            sequence.move("returning")
        else:
            self._queues.requeue(sequence)


class MicroBatches:
    """Owns the count of plans, and for each sequence the plan that draws its latest token.

    An engine of p stages computes p plans at a time. A sequence whose token is drawn by one of them can be in none of
    the p - 1 plans after it: the first stage would wait for the last one, and all others for them. So each plan holds
    one p-th of the sequences that decode, and a sequence is in every p-th plan at most."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._plan = 0

    def choose(self, decoding: list[Sequence]) -> list[Sequence]:
        """The sequences that the next plan may hold, in their order."""
        return [sequence for sequence in decoding if self._may_continue(sequence)][: self._share(len(decoding))]

    def _share(self, decoding: int) -> int:
        """How many of the `decoding` sequences the next plan holds: any p plans in a row have equal parts."""
        turn = self._plan % self._stages
        part = (turn + 1) * decoding // self._stages - turn * decoding // self._stages
        return max(1, part)

    def record_plan(self, work: Iterable[SequenceWork], by_id: Mapping[SequenceId, Sequence]) -> None:
        """A plan with this work is made; the sequences that draw in it pause for the plans behind it."""
        for item in work:
            if item.sample:
                by_id[item.sequence].drawn_in = self._plan
        self._plan += 1

    def _may_continue(self, sequence: Sequence) -> bool:
        if sequence.tokens.length >= sequence.tokens.limit or sequence.phase != "decoding":
            return False  # all its tokens are on their way
        return not sequence.tokens.in_flight or self._plan - sequence.drawn_in >= self._stages


class DecodePlanner:
    """Owns nothing; plans for the sequences in the decoding queue. `micro_batches` is None on a single stage."""

    def __init__(
        self,
        memory: BlockAllocator,
        queues: SequenceQueues,
        preemption: Preemption,
        speculation: SpeculationBudget,
        micro_batches: MicroBatches | None,
    ) -> None:
        self._memory = memory
        self._queues = queues
        self._preemption = preemption
        self._speculation = speculation
        self._micro_batches = micro_batches

    def plan(self, step: StepBuilder, members: list[Sequence] | None = None) -> None:
        """Adds a token of each sequence, or only of `members`. It is called before all other parts of the step, so that
        no stream stalls behind a long prompt."""
        work = step.work
        if members is None:
            members = self._queues.decoding.copy()  # preemption changes the queue
        if self._micro_batches is not None:
            members = self._micro_batches.choose(members)
        speculation, guided, drafts = self._speculation, self._queues.guided > 0, 0
        if members and (speculation.max_drafts or guided):
            step.drafts = drafts = speculation.start_step(len(members), step.budget, guided=guided)
        for sequence in members:
            tokens = sequence.tokens
            if tokens.length >= tokens.limit or sequence.phase != "decoding":
                continue  # all its tokens are on their way; or it was preempted for one before it
            if drafts and (extra := self._extra(sequence, step)):
                work.append(self._speculate(sequence, extra, step))
                continue
            if tokens.planned < sequence.blocks.capacity:
                work.append(sequence.decode_work)
            elif self._preemption.make_room(sequence):
                work.append(SequenceWork(sequence.id, 1, pack(self._memory.grow(sequence, tokens.length)), True))
                step.filled.append(sequence)  # the block before is full
            else:
                continue
            tokens.plan_decode(1)
        step.budget -= len(work) + drafts - step.drafts
        step.samples = len(work)

    def _extra(self, sequence: Sequence, step: StepBuilder) -> int:
        """How many drafts the sequence's next step may hold. They take no block that a running sequence is sure to
        need, and never exceed the limit: until results say otherwise, everything in flight counts as accepted."""
        tokens = sequence.tokens
        room = step.drafts // self._speculation.rows_per_draft(sequence)
        wanted = min(self._speculation.drafts_for(sequence), tokens.limit - tokens.length - 1, room)
        missing = tokens.length + wanted - sequence.blocks.capacity
        if missing > 0:
            self._memory.reclaim(sequence)
            if self._memory.free_blocks - blocks_for(missing, tokens.block_size) < self._queues.running:
                wanted = sequence.blocks.capacity - tokens.length
        return max(0, wanted)

    def _speculate(self, sequence: Sequence, extra: int, step: StepBuilder) -> SequenceWork:
        blocks = self._memory.grow(sequence, sequence.tokens.length + extra)
        if blocks:
            step.filled.append(sequence)
        sequence.tokens.plan_decode(1 + extra)
        step.drafts -= extra * self._speculation.rows_per_draft(sequence)
        step.extras[sequence.id] = extra
        return SequenceWork(sequence.id, 1, pack(blocks), True, extra)
