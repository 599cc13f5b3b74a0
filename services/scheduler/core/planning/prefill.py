"""The prompts that a step computes, or chunks of them, after the decodes."""

from __future__ import annotations

from services.scheduler.core.memory.allocation import BlockAllocator
from services.scheduler.core.planning.step_builder import StepBuilder
from services.scheduler.core.queue.sequence_queues import SequenceQueues
from services.scheduler.core.sequence import Sequence
from shared.blocks import BLOCK_SIZE
from shared.messages.worker import SequenceWork
from shared.packing import pack


class PrefillPlanner:
    """Owns nothing; plans for the sequences in the prefilling queue."""

    def __init__(self, memory: BlockAllocator, queues: SequenceQueues) -> None:
        self._memory = memory
        self._queues = queues

    def plan(self, step: StepBuilder) -> None:
        """Adds the rest of chunked prompts. One that finds no block free waits for decodes to end: what prefills under
        way still need fits by itself, since none was admitted without counting it (`Admission`)."""
        for sequence in self._queues.prefilling.copy():  # who is whole decodes from now on
            self.prefill(sequence, step)

    def prefill(self, sequence: Sequence, step: StepBuilder) -> None:
        """Adds as many of the sequence's tokens as budget and free blocks allow, which may be none."""
        tokens = sequence.tokens
        room = sequence.blocks.capacity - tokens.planned + self._memory.pool.free * BLOCK_SIZE
        count = min(tokens.length - tokens.planned, step.budget, room)
        if sequence.scored:
            logprobs = 1 + (sequence.generation.sampling.prompt_logprobs or 0)
            count = min(count, step.scores, step.logprobs // logprobs)
            step.scores -= max(0, count)
            step.logprobs -= max(0, count) * logprobs
        if count <= 0:
            return
        if sequence.id not in self._queues.introduced:
            if not step.fits_new(sequence):
                return
            step.start(sequence)
            self._queues.introduce(sequence)
        new_blocks = self._memory.grow(sequence, tokens.planned + count)
        tokens.plan_prefill(count)
        step.budget -= count
        last = tokens.planned == tokens.length
        step.work.append(SequenceWork(sequence.id, count, pack(new_blocks), last))
        step.filled.append(sequence)
        if last:
            self._draw(sequence, step)

    def _draw(self, sequence: Sequence, step: StepBuilder) -> None:
        """The prompt is whole with this step, which draws the first token."""
        step.samples += 1
        sequence.tokens.expect_token()
        if sequence.transfer.decode_on is not None and sequence.tokens.length < sequence.tokens.limit:
            self._queues.start_hand_over(sequence)
            step.handing.append(sequence)
        else:
            self._queues.start_decoding(sequence)
