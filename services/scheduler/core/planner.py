"""Builds the next step: who computes how many tokens in which blocks. Knows lengths, never token values.

One token budget a step. Decoding sequences first (one token each), so that nobody's stream stalls behind a long
prompt; then the rest of chunked prefills; then newcomers. Memory that runs out under a decoding sequence is taken
from whoever stands last in line (preemption by recompute).
"""

from __future__ import annotations

from typing import NamedTuple

from services.scheduler.core.kv_memory import KvMemory, blocks_for
from services.scheduler.core.limits import Limits
from services.scheduler.core.line import Line
from services.scheduler.core.sequence import Sequence
from shared.blocks import BLOCK_SIZE
from shared.ids import SequenceId
from shared.messages.worker import NewSequence, Work
from shared.tokens import TOKEN_BYTES, pack


class Started(NamedTuple):
    """A sequence that enters the engine, and how many of its tokens were cached."""

    sequence: Sequence
    cached: int


class Planned(NamedTuple):
    """One step's contents."""

    released: tuple[SequenceId, ...]
    new: tuple[NewSequence, ...]
    work: tuple[Work, ...]
    started: tuple[Started, ...]
    samples: int
    """How many works draw a token."""
    tokens: int
    """Tokens that the step computes."""


class Planner:
    """Owns the three lines, the sequences in the engine by number, and the KV memory."""

    def __init__(self, limits: Limits, num_blocks: int) -> None:
        self.memory = KvMemory(num_blocks)
        self.waiting = Line()
        self.prefilling = Line()
        self.decoding = Line()
        self.by_id: dict[SequenceId, Sequence] = {}
        self.preemptions = 0
        self._limits = limits
        self._released: list[SequenceId] = []
        # of the step that is being planned
        self._work: list[Work] = []
        self._budget = 0
        self._samples = 0
        self._filled: list[Sequence] = []
        """Sequences that may have filled a block."""

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def plan(self) -> Planned | None:
        """The next step, or None where there is nothing to compute before results come."""
        self._work, self._filled = [], []
        self._budget, self._samples = self._limits.max_batch_tokens, 0
        preemptions = self.preemptions
        self._plan_decodes()
        self._plan_prefills()
        # Who was preempted just now stands first in line; it would only come back to be preempted again.
        started = self._admit() if preemptions == self.preemptions else []
        if not self._work:
            return None
        for sequence in self._filled:
            self.memory.index_full_blocks(sequence)
        released, self._released = self._released, []
        return Planned(
            released=tuple(released),
            new=tuple(_new_sequence(*start) for start in started),
            work=tuple(self._work),
            started=tuple(started),
            samples=self._samples,
            tokens=self._limits.max_batch_tokens - self._budget,
        )

    # ---- decode

    def _plan_decodes(self) -> None:
        work = self._work
        for sequence in self.decoding.members():
            if sequence.length >= sequence.limit or sequence.phase != "decoding":
                continue  # all its tokens are on their way; or it was preempted for one before it
            if sequence.planned < sequence.capacity:
                work.append(sequence.decode_work)
            elif self._make_room(sequence):
                work.append(Work(sequence.id, 1, pack(self.memory.grow(sequence, sequence.length)), True))
                self._filled.append(sequence)  # the block before is full
            else:
                continue
            sequence.planned += 1
            sequence.length += 1
        self._budget -= len(work)
        self._samples = len(work)

    def _make_room(self, sequence: Sequence) -> bool:
        """Frees a block from the end of the line; False where that end was `sequence` itself.

        Everybody behind `sequence` is still without work in this step, because decodes are planned in the order of
        the line and prefills after them: so nothing that is planned is taken back.
        """
        while self.memory.pool.free == 0:
            victim = self._last_in_line()
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _last_in_line(self) -> Sequence:
        ends = [line.last for line in (self.decoding, self.prefilling) if line.last is not None]
        return max(ends, key=lambda sequence: sequence.rank)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes everything from `sequence`. It waits again, once the token on its way (if any) is known."""
        self.preemptions += 1
        self._release(sequence)
        if sequence.awaits_token:
            sequence.move("returning")
        else:
            self.wait(sequence)

    # ---- prefill

    def _plan_prefills(self) -> None:
        """The rest of chunked prompts. One that finds no block free waits for decodes to end: what prefills under way
        still need fits by itself, since nobody was admitted without counting it (`_fits`)."""
        for sequence in self.prefilling.members():
            self._prefill(sequence)

    def _prefill(self, sequence: Sequence) -> None:
        """Plans as many of the sequence's tokens as budget and free blocks allow."""
        room = sequence.capacity - sequence.planned + self.memory.pool.free * BLOCK_SIZE
        count = min(sequence.length - sequence.planned, self._budget, room)
        if count <= 0:
            return
        new_blocks = self.memory.grow(sequence, sequence.planned + count)
        sequence.planned += count
        self._budget -= count
        last = sequence.planned == sequence.length
        self._work.append(Work(sequence.id, count, pack(new_blocks), last))
        self._filled.append(sequence)
        if last:
            self._begin_decode(sequence)

    def _begin_decode(self, sequence: Sequence) -> None:
        self._samples += 1
        sequence.length += 1
        self.prefilling.remove(sequence)
        sequence.move("decoding")
        self.decoding.add(sequence)

    # ---- newcomers

    def _admit(self) -> list[Started]:
        """Newcomers, in line, while there is budget, a place, and memory for the whole of each."""
        started: list[Started] = []
        new_bytes = 0
        while self._budget > 0 and self.running < self._limits.max_running:
            sequence = self.waiting.first
            if sequence is None:
                break
            new_bytes += len(sequence.tokens) * TOKEN_BYTES
            if started and new_bytes > self._limits.max_new_bytes:
                break
            cached = self.memory.cached_blocks(sequence)
            if not self._fits(sequence, cached):
                break
            self._enter(sequence, cached)
            started.append(Started(sequence, sequence.planned))
            self._prefill(sequence)
        return started

    def _fits(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether all known tokens fit, beside what prefills under way still need and a block for everybody running.

        Admitting by the first chunk alone would fill memory with prompts of which none can be finished; and without
        the block for each, a newcomer would be preempted within the next 16 steps.
        """
        pool = self.memory.pool
        promised = sum(blocks_for(s.length) - len(s.blocks) for s in self.prefilling) + self.running
        needed = blocks_for(sequence.length) - len(cached) + pool.idle_among(cached)
        return needed + promised <= pool.free

    def _enter(self, sequence: Sequence, cached: list[int]) -> None:
        self.waiting.remove(sequence)
        self.memory.adopt(sequence, cached)
        sequence.move("prefilling")
        self.prefilling.add(sequence)

    # ---- coming and leaving

    def accept(self, sequence: Sequence) -> None:
        """A new sequence, into the waiting line."""
        self.by_id[sequence.id] = sequence
        self.waiting.add(sequence)

    def wait(self, sequence: Sequence) -> None:
        """Back into the waiting line, preempted and with all its tokens known."""
        sequence.move("waiting")
        self.waiting.add(sequence)

    def end(self, sequence: Sequence) -> None:
        """Takes `sequence` out, whatever its phase; its blocks are free for the next plan."""
        if sequence.phase == "waiting":
            self.waiting.remove(sequence)
        self._release(sequence)
        del self.by_id[sequence.id]
        sequence.move("ended")

    def _release(self, sequence: Sequence) -> None:
        """Takes a running sequence out of its line and gives its blocks back; the workers hear with the next plan."""
        line = {"prefilling": self.prefilling, "decoding": self.decoding}.get(sequence.phase)
        if line is not None:
            line.remove(sequence)
            self.memory.release(sequence)
            sequence.planned = 0
            self._released.append(sequence.id)


def _new_sequence(sequence: Sequence, cached: int) -> NewSequence:
    generation = sequence.generation
    return NewSequence(
        sequence=sequence.id,
        tokens=pack(sequence.tokens),
        prompt_length=sequence.prompt_length,
        computed=cached,
        blocks=pack(sequence.blocks[: cached // BLOCK_SIZE]),
        sampling=generation.sampling,
        min_tokens=generation.stopping.min_tokens,
        stop_token_ids=tuple(sorted(sequence.stops)),
    )
