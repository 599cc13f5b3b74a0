"""The prompts that a step computes, or chunks of them, after the decodes."""

from __future__ import annotations

from services.scheduler.core.kv_memory import KvMemory
from services.scheduler.core.next_step import NextStep
from services.scheduler.core.places import Places
from services.scheduler.core.sequence import Sequence
from shared.blocks import BLOCK_SIZE
from shared.messages.worker import Work
from shared.tokens import pack


class Prefills:
    """Owns nothing; plans for those in the prefilling line."""

    def __init__(self, memory: KvMemory, places: Places) -> None:
        self._memory = memory
        self._places = places

    def plan(self, step: NextStep) -> None:
        """The rest of chunked prompts. One that finds no block free waits for decodes to end: what prefills under way
        still need fits by itself, since nobody was admitted without counting it (`Newcomers`)."""
        for sequence in self._places.prefilling.members():
            self.prefill(sequence, step)

    def prefill(self, sequence: Sequence, step: NextStep) -> None:
        """Plans as many of the sequence's tokens as budget and free blocks allow."""
        room = sequence.capacity - sequence.planned + self._memory.pool.free * BLOCK_SIZE
        count = min(sequence.length - sequence.planned, step.budget, room)
        if sequence.scored:
            told = 1 + (sequence.generation.sampling.prompt_logprobs or 0)
            count = min(count, step.scores, step.told // told)
            step.scores -= max(0, count)
            step.told -= max(0, count) * told
        if count <= 0 or not (sequence.introduced or step.introduce(sequence)):
            return
        new_blocks = self._memory.grow(sequence, sequence.planned + count)
        sequence.planned += count
        step.budget -= count
        last = sequence.planned == sequence.length
        step.work.append(Work(sequence.id, count, pack(new_blocks), last))
        step.filled.append(sequence)
        if last:
            self._draw(sequence, step)

    def _draw(self, sequence: Sequence, step: NextStep) -> None:
        """The prompt is whole with this step, which draws the first token."""
        step.samples += 1
        sequence.length += 1
        if sequence.decode_on is not None and sequence.length < sequence.limit:
            self._places.hand(sequence)
            step.handing.append(sequence)
        else:
            self._places.decode(sequence)
