"""Which waiting sequences enter with the next step: the first in the queue, while there is budget, a free place among
those that run, and memory for the whole of it."""

from __future__ import annotations

from typing import assert_never

from services.scheduler.core.counters import EngineCounters
from services.scheduler.core.memory.allocation import BlockAllocator
from services.scheduler.core.planning.prefill import PrefillPlanner
from services.scheduler.core.planning.step_builder import StepBuilder
from services.scheduler.core.queue.sequence_queues import SequenceQueues
from services.scheduler.core.queue.shared_prompts import SharedPrompts
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.transfer.loads import Loads
from shared.blocks import blocks_for


class Admission:
    """Owns nothing; takes from the waiting queue."""

    def __init__(
        self,
        max_running: int,
        memory: BlockAllocator,
        queues: SequenceQueues,
        loads: Loads,
        prompts: SharedPrompts,
        prefills: PrefillPlanner,
        counters: EngineCounters,
    ) -> None:
        self._max_running = max_running
        self._memory = memory
        self._queues = queues
        self._loads = loads
        self._prompts = prompts
        self._prefills = prefills
        self._counters = counters

    def admit(self, step: StepBuilder, now: float) -> None:
        """Lets sequences enter until one has to go on waiting; all behind it wait, too."""
        while self._queues.running < self._max_running:
            sequence = self._queues.waiting.first
            if sequence is None or not self._admit_first(sequence, step, now):
                return

    def _admit_first(self, sequence: Sequence, step: StepBuilder, now: float) -> bool:
        """Admits the queue's first sequence, loads it, or sets it aside; False if it must wait in the queue."""
        looked_up = sequence.id in self._loads.lookups
        if step.budget <= 0 and not looked_up:
            return False
        cached = self._memory.cached_blocks(sequence)
        decision = self._loads.decide(sequence, len(cached), now) if looked_up else "compute"
        match decision:
            case "compute" if self._prompts.wait(sequence, len(cached)):
                self._counters.prompts_shared += 1
                self._queues.set_aside(sequence)
            case "compute":
                return self._fits(sequence, cached) and self._enter(sequence, cached, step)
            case "load":
                if not self._fits(sequence, cached):
                    return False
                self._queues.start_loading(sequence)
                self._loads.start(sequence, cached, now)
            case "await":
                self._loads.await_other(sequence, len(cached))
                self._queues.set_aside(sequence)
            case "look again":
                if self._loads.look_up(sequence):
                    self._queues.set_aside(sequence)
                else:
                    self._loads.forget(sequence)
            case _:
                assert_never(decision)
        return True

    def has_room_for(self, suspect: Sequence) -> bool:
        """Whether the first of the suspects could enter."""
        return self._queues.running < self._max_running and self._fits(suspect, self._memory.cached_blocks(suspect))

    def admit_suspect(self, suspect: Sequence) -> None:
        """Lets the first of the suspects enter. It finds room, and computes what a KV store may hold of it."""
        self._queues.start_trial(suspect, self._memory.cached_blocks(suspect))

    def _fits(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether all known tokens fit, beside what prefills under way still need and a block for each that runs.

        Admitting by the first chunk alone would fill memory with prompts of which none can be finished; and without
        the block for each, a new sequence would be preempted within the next 16 steps.
        """
        pool, queues = self._memory.pool, self._queues
        coming = (*queues.prefilling, *queues.loading.values())
        promised = sum(blocks_for(s.tokens.length) - len(s.blocks.numbers) for s in coming) + queues.running
        needed = blocks_for(sequence.tokens.length) - len(cached) + pool.count_free(cached)
        return needed + promised <= pool.free

    def _enter(self, sequence: Sequence, cached: list[int], step: StepBuilder) -> bool:
        """Plans the prompt from this step on; False if the plan has no room for it."""
        if step.budget <= 0 or not step.fits_new(sequence):
            return False
        self._queues.start_prefill(sequence, cached)
        self._prefills.prefill(sequence, step)
        return True
