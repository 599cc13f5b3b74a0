"""The prompts that a step computes, or chunks of them, after the decodes: those under way, then waiting sequences.

Waiting sequences are admitted from the head of the queue, while there is budget, fewer sequences run than may, and
memory holds all of each prompt. Long prompts (beyond a threshold, if one is set) come last, with a share of the budget.
"""

from __future__ import annotations

from typing import assert_never

from services.scheduler.core.counters import EngineCounters
from services.scheduler.core.memory import BlockAllocator
from services.scheduler.core.planning.step_builder import StepBuilder
from services.scheduler.core.queue.sequence_queues import SequenceQueues
from services.scheduler.core.queue.shared_prompts import SharedPrompts
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.transfer.loads import BlockLoads
from services.scheduler.core.transfer.remote_prefills import RemotePrefills
from shared.messages.generation import mutual_run
from shared.messages.worker import SequenceWork
from shared.packing import pack


class PrefillPlanner:
    """Owns nothing; plans for the sequences in the prefilling queue."""

    def __init__(
        self, memory: BlockAllocator, queues: SequenceQueues, max_batch_tokens: int, long_threshold: int = 0
    ) -> None:
        """`max_batch_tokens`: of a step. `long_threshold`: a prompt with more tokens left is long; 0: none is."""
        self.long_threshold = long_threshold
        self._max_batch_tokens = max_batch_tokens
        self._memory = memory
        self._queues = queues

    def is_long(self, sequence: Sequence) -> bool:
        """Whether short prompts go first."""
        return not sequence.whole and 0 < self.long_threshold < sequence.tokens.length - sequence.tokens.planned

    def reserve(self, step: StepBuilder) -> int:
        """Takes the tokens out of the budget that are reserved for long prompts under way, so that short ones never
        stop them. Returns how many, to be given back before `plan_long`."""
        if not self.long_threshold or not any(map(self.is_long, self._queues.prefilling)):
            return 0
        reserved = min(self.long_threshold, (step.budget + 1) // 2)
        step.budget -= reserved
        return reserved

    def plan(self, step: StepBuilder) -> None:
        """Adds the rest of chunked prompts, except long ones. A prompt that finds no block free waits until decodes
        end: all prefills under way fit into memory together, because each was admitted only after counting the others
        (`Admission`)."""
        for sequence in self._queues.prefilling.copy():  # a sequence whose prompt is complete decodes from now on
            if not self.is_long(sequence):
                self.prefill(sequence, step)

    def plan_long(self, step: StepBuilder) -> None:
        """Adds long prompts, in order, with the rest of the budget."""
        for sequence in self._queues.prefilling.copy():
            if step.budget <= 0:
                return
            if self.is_long(sequence):
                self.prefill(sequence, step)

    def prefill(self, sequence: Sequence, step: StepBuilder) -> None:
        """Adds as many of the sequence's tokens as budget and free blocks allow, which may be none."""
        tokens, memory = sequence.tokens, self._memory
        memory.reclaim(sequence)
        room = sequence.blocks.capacity - tokens.planned + memory.free_blocks * memory.block_size
        budget = step.budget + (step.withheld if sequence.whole else 0)  # it has to be computed at some time
        count = min(memory.step_end(sequence, tokens.length) - tokens.planned, budget, room)
        if sequence.scored:
            logprobs = 1 + (sequence.generation.sampling.prompt_logprobs or 0)
            count = min(count, step.scores, step.logprobs // logprobs)
            step.scores -= max(0, count)
            step.logprobs -= max(0, count) * logprobs
        if sequence.pooled and count == tokens.length - tokens.planned:
            if step.pooled_bytes < sequence.vector_bytes:
                count -= 1  # the last token waits for a step that has room for the vector
            else:
                step.pooled_bytes -= sequence.vector_bytes
        count = self._uncut(sequence, count, room, step)
        if count <= 0 or (sequence.whole and count < tokens.length - tokens.planned):
            return
        if sequence.id not in self._queues.introduced:
            if not step.fits_new(sequence):
                return
            step.start(sequence)
            self._queues.introduce(sequence)
        new_blocks = memory.grow(sequence, tokens.planned + count)
        whole = tokens.plan_prefill(count)
        step.budget -= count
        step.work.append(SequenceWork(sequence.id, count, pack(new_blocks), whole))
        step.filled.append(sequence)
        if not whole:
            return
        step.samples += 1
        if sequence.transfer.decode_on is not None and tokens.length < tokens.limit:
            self._queues.start_hand_over(sequence)
            step.handing.append(sequence)
        else:
            self._queues.start_decoding(sequence)

    def _uncut(self, sequence: Sequence, count: int, room: int, step: StepBuilder) -> int:
        """Shortens a chunk so that it does not end within a run of tokens that attend to each other. A run at the start
        of the chunk is taken whole, even beyond the target for the time between tokens: it has no smaller parts."""
        planned, embeds = sequence.tokens.planned, sequence.generation.prompt_embeds
        cut = mutual_run(embeds, planned + count) if count > 0 else None
        if cut is None or cut[0] == planned + count:
            return count
        if cut[0] > planned:
            return cut[0] - planned
        left = cut[1] - planned
        used = sum(work.count for work in step.work)
        return left if left <= min(room, self._max_batch_tokens - used) else 0

    def prefill_behind(self, sequence: Sequence, loaded: int, count: int, step: StepBuilder) -> None:
        """Adds the `count` tokens behind the first `loaded`, which the step's load brings. Nothing is drawn, and nobody
        else finds the blocks, before the load is known to have succeeded."""
        step.start_loading(sequence, loaded)
        self._queues.introduce(sequence)
        new_blocks = self._memory.grow(sequence, loaded + count)
        step.budget -= count
        step.work.append(SequenceWork(sequence.id, count, pack(new_blocks), False))


class Admission:
    """Owns nothing; takes from the waiting queue."""

    def __init__(
        self,
        max_running: int,
        memory: BlockAllocator,
        queues: SequenceQueues,
        loads: BlockLoads,
        remote: RemotePrefills,
        prompts: SharedPrompts,
        prefills: PrefillPlanner,
        counters: EngineCounters,
    ) -> None:
        self._max_running = max_running
        self._memory = memory
        self._queues = queues
        self._loads = loads
        self._remote = remote
        self._prompts = prompts
        self._prefills = prefills
        self._counters = counters

    def admit(self, step: StepBuilder, now: float) -> None:
        """Admits sequences until one has to wait; all behind that one wait, too. Behind a sequence that waits for a
        slot of its adapter, only sequences that need no slot are admitted: so it gets the next slot, and delays no
        others."""
        queues, place, slotless = self._queues, 0, False
        while place < len(queues.waiting):
            first = queues.waiting[place]
            if first.generation.lora is not None and (slotless or not queues.adapters.has_room(first)):
                place, slotless = place + 1, True
                continue
            kept, _ = self._remote.room_besides(first.generation.request)
            if queues.running + kept >= self._max_running or not self._admit_first(first, step, now):
                return

    def _admit_first(self, sequence: Sequence, step: StepBuilder, now: float) -> bool:
        """Admits the queue's first sequence, loads it, or sets it aside; False if it must wait in the queue."""
        looked_up = sequence.id in self._loads.lookups
        if step.budget <= 0 and not looked_up:
            return False
        cached = self._memory.cached_blocks(sequence)
        unsought = self._loads.enabled and sequence.transfer.unsought
        if unsought and not self._fits(sequence, cached):
            return False
        decision = self._loads.decide(sequence, len(cached), now) if looked_up or unsought else "compute"
        match decision:
            case "compute" if self._prompts.wait(sequence, len(cached)):
                self._counters.prompts_shared += 1
                self._queues.set_aside(sequence)
            case "compute" if self._remote.pays(sequence, len(cached), decodes=bool(self._queues.decoding)):
                if not self._fits(sequence, cached):
                    return False
                self._queues.leave(sequence)
                self._remote.leave(sequence, now)
            case "compute":
                if step.budget <= 0 or not self._fits(sequence, cached) or not step.fits_new(sequence):
                    return False
                self._remote.release(sequence.generation.request)
                self._queues.start_prefill(sequence, cached)
                if not self._prefills.is_long(sequence):
                    self._prefills.prefill(sequence, step)
            case "load":
                if not self._fits(sequence, cached):
                    return False
                self._remote.release(sequence.generation.request)
                self._load(sequence, cached, step, now)
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

    def _load(self, sequence: Sequence, cached: list[int], step: StepBuilder, now: float) -> None:
        """Has the sequence's blocks loaded, and computes the tokens after them at once if that pays."""
        embeds = sequence.generation.prompt_embeds
        uncut = embeds is not None and bool(embeds.mutual)  # what is behind the load may begin within an image
        short = step.fits_new(sequence) and not self._prefills.is_long(sequence) and not uncut
        overlap = self._loads.overlap(sequence, len(cached), step.budget, now) if short else 0
        self._queues.start_loading(sequence)
        loaded = self._loads.start(sequence, cached, now, overlap)
        if overlap:
            self._prefills.prefill_behind(sequence, loaded, overlap, step)

    def has_room_for(self, suspect: Sequence) -> bool:
        """Whether the first of the suspects could enter."""
        if self._queues.running >= self._max_running or not self._queues.adapters.has_room(suspect):
            return False
        return self._fits(suspect, self._memory.cached_blocks(suspect))

    def admit_suspect(self, suspect: Sequence) -> None:
        """Lets the first of the suspects enter. It finds room, and computes what a KV store may hold of it."""
        self._queues.start_prefill(suspect, self._memory.cached_blocks(suspect))

    def _fits(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether all known tokens fit, beside what prefills under way still need and a block for each that runs.

        Admitting by the first chunk alone would fill memory with prompts of which none can be finished; and without
        the block for each, a new sequence would be preempted within the next few steps.
        """
        queues = self._queues
        _, kept = self._remote.room_besides(sequence.generation.request)
        coming = (*queues.prefilling, *queues.loading.values())
        return self._memory.fits(sequence, cached, coming, queues.running + kept)
