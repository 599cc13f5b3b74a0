"""The decodes of a step: one token for each sequence, and drafts where they pay.

A step may yield several tokens of a sequence, so what is planned are upper bounds, with blocks for all of them. Results
say how much less it was (`drafts.py`): then lengths go back, and the blocks stay for the next steps.
"""

from __future__ import annotations

from services.scheduler.core.kv_memory import KvMemory
from services.scheduler.core.micro_batches import MicroBatches
from services.scheduler.core.next_step import NextStep
from services.scheduler.core.places import Places
from services.scheduler.core.preemption import Preemption
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.speculation import Speculation
from shared.blocks import blocks_for
from shared.messages.worker import Work
from shared.tokens import pack


class Decodes:
    """Owns nothing; plans for those in the decoding line."""

    def __init__(
        self,
        memory: KvMemory,
        places: Places,
        preemption: Preemption,
        speculation: Speculation,
        micro_batches: MicroBatches,
    ) -> None:
        self._memory = memory
        self._places = places
        self._preemption = preemption
        self._speculation = speculation
        self._micro_batches = micro_batches

    def plan(self, step: NextStep) -> None:
        """First of all that a step holds: nobody's stream stalls behind a long prompt."""
        work, members = step.work, self._micro_batches.of_next_plan(self._places.decoding.members())
        step.drafts = drafts = self._speculation.begin(len(members), step.budget, guided=self._places.guided > 0)
        for sequence in members:
            if sequence.length >= sequence.limit or sequence.phase != "decoding":
                continue  # all its tokens are on their way; or it was preempted for one before it
            if drafts and (extra := self._extra(sequence, step)):
                work.append(self._speculate(sequence, extra, step))
                continue
            if sequence.planned < sequence.capacity:
                work.append(sequence.decode_work)
            elif self._preemption.make_room(sequence):
                work.append(Work(sequence.id, 1, pack(self._memory.grow(sequence, sequence.length)), True))
                step.filled.append(sequence)  # the block before is full
            else:
                continue
            sequence.planned += 1
            sequence.length += 1
        step.budget -= len(work) + drafts - step.drafts
        step.samples = len(work)

    def _extra(self, sequence: Sequence, step: NextStep) -> int:
        """How many drafts its next step may hold. They take no block that somebody running needs for certain, and
        nothing beyond the limit: until results say less, all that is in flight counts as accepted."""
        wanted = min(self._speculation.wanted(sequence), sequence.limit - sequence.length - 1, step.drafts)
        missing = blocks_for(sequence.length + wanted) - len(sequence.blocks)
        if missing > 0 and self._memory.pool.free - missing < self._places.running:
            wanted = sequence.capacity - sequence.length
        return max(0, wanted)

    def _speculate(self, sequence: Sequence, extra: int, step: NextStep) -> Work:
        blocks = self._memory.grow(sequence, sequence.length + extra)
        if blocks:
            step.filled.append(sequence)
        sequence.planned += 1 + extra
        sequence.length += 1 + extra
        step.drafts -= extra
        step.extras[sequence.id] = extra
        return Work(sequence.id, 1, pack(blocks), True, extra)
