"""Keeps each sequence in one of three queues, or outside them, as its phase says.

waiting → (compiling, seeking, loading, or quarantined) → prefilling → decoding, or handing; back to waiting when it is
preempted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container
from operator import attrgetter

from services.scheduler.core.memory import BlockAllocator
from services.scheduler.core.queue.adapters import AdapterSlots
from services.scheduler.core.queue.grammars import Grammars
from services.scheduler.core.queue.shared_prompts import SharedPrompts
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.transfer.loads import BlockLoads
from shared.blocks import BlockHash
from shared.ids import SequenceId

_queue_key = attrgetter("queue_key")


class RequestQueue(list[Sequence]):
    """One queue of sequences, in the order of their keys, which only `add` and `remove` change. Keys are unique, so a
    member is found by bisection."""

    def add(self, sequence: Sequence) -> None:
        """Puts the sequence where its key belongs."""
        insort(self, sequence, key=_queue_key)

    def remove(self, sequence: Sequence) -> None:
        """Takes the sequence out. Raises ValueError where it is not in the queue."""
        position = bisect_left(self, sequence.queue_key, key=_queue_key)
        if position == len(self) or self[position] is not sequence:
            raise ValueError(f"{sequence.generation.request} is not in this queue")
        del self[position]

    @property
    def first(self) -> Sequence | None:
        """The one that is served next; None where the queue is empty."""
        return self[0] if self else None

    @property
    def last(self) -> Sequence | None:
        """The one that is preempted first; None where the queue is empty."""
        return self[-1] if self else None


class SequenceQueues:
    """Owns the three queues, the sequences outside them, all sequences by number, and which of them the workers
    know."""

    def __init__(
        self, memory: BlockAllocator, loads: BlockLoads, grammars: Grammars, prompts: SharedPrompts, max_loras: int = 0
    ) -> None:
        self.waiting = RequestQueue()
        self.suspects = RequestQueue()
        """Sequences that are to be computed alone, in the order in which they are."""
        self.prefilling = RequestQueue()
        self.decoding = RequestQueue()
        self.compiling: dict[SequenceId, Sequence] = {}
        self.seeking: dict[SequenceId, Sequence] = {}
        self.loading: dict[SequenceId, Sequence] = {}
        self.handing: dict[SequenceId, Sequence] = {}
        self.by_id: dict[SequenceId, Sequence] = {}
        self.introduced: set[SequenceId] = set()
        """Sequences that the workers know."""
        self.released: list[SequenceId] = []
        """Sequences that the workers know, and may forget with the next plan."""
        self.guided = 0
        """Sequences with a grammar."""
        self.adapters = AdapterSlots(max_loras)
        self._memory = memory
        self._loads = loads
        self._grammars = grammars
        self._prompts = prompts

    @property
    def running(self) -> int:
        """Sequences that have KV blocks, or are about to be handed over to another engine."""
        return len(self.prefilling) + len(self.decoding) + len(self.loading) + len(self.handing)

    @property
    def queued(self) -> int:
        """Sequences that wait for their turn, or beside the queue for what they need before it."""
        return len(self.waiting) + len(self.suspects) + len(self.seeking) + len(self.compiling)

    def backlog(self, max_running: int) -> int:
        """Sequences that wait, without those for which the running batch has a place: a burst that comes between two
        plans waits for nothing else. A sequence whose grammar is compiled can take none yet."""
        free = max(0, max_running - self.running)
        return max(0, self.queued - len(self.compiling) - free) + len(self.compiling)

    def take_released(self) -> tuple[SequenceId, ...]:
        """The released sequences that the next plan makes the workers forget; each is returned once."""
        released, self.released = self.released, []
        return tuple(released)

    # ---- before their turn

    def add(self, sequence: Sequence) -> None:
        """Adds a new sequence to the waiting queue; or outside it while its grammar is compiled, or while the store
        searches for its blocks."""
        self.by_id[sequence.id] = sequence
        if sequence.grammar is not None:
            self.guided += 1
            if not self._grammars.start_use(sequence.grammar.key):
                sequence.move("compiling")
                self.compiling[sequence.id] = sequence
                self._grammars.wait(sequence)
                return
        self._queue(sequence)

    def finish_compiling(self, sequence: Sequence) -> None:
        """The sequence's grammar is ready: it enters the waiting queue."""
        del self.compiling[sequence.id]
        self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Into the waiting queue, with all its tokens known. The store may have what it lacks, which is looked for now
        or, if it was preempted, in its turn: until then others take its blocks."""
        sequence.move("waiting")
        self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        if sequence.generation.suspect_until is not None and sequence.suspected:
            sequence.move("quarantined")
            self.suspects.add(sequence)
            return
        self.waiting.add(sequence)
        if self._loads.enabled and not sequence.transfer.unsought and self._loads.look_up(sequence):
            self.set_aside(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """Takes the sequence out of the waiting queue until `resume`: others, or the store, may have its blocks."""
        self.waiting.remove(sequence)
        sequence.move("seeking")
        self.seeking[sequence.id] = sequence

    def resume(self, sequence: Sequence) -> None:
        """Puts the sequence back at its position in the waiting queue."""
        del self.seeking[sequence.id]
        sequence.move("waiting")
        self.waiting.add(sequence)

    # ---- their turn

    def start_prefill(self, sequence: Sequence, cached: list[int]) -> None:
        """From the waiting queue, or from the suspects, among those that compute their prompts, but for what its
        `cached` blocks hold."""
        if self._loads.enabled:
            self._loads.forget(sequence)
            self._loads.record_return(sequence, loaded=False)
        queue = self.suspects if sequence.phase == "quarantined" else self.waiting
        queue.remove(sequence)
        self._memory.adopt(sequence, cached)
        self._prefill(sequence)

    def start_loading(self, sequence: Sequence) -> None:
        """From the waiting queue to where it is given blocks from the store."""
        self.waiting.remove(sequence)
        self.adapters.start_use(sequence)
        sequence.move("loading")
        self.loading[sequence.id] = sequence

    def finish_loading(self, sequence: Sequence, tokens: int | None, computed: int = 0) -> None:
        """The load ended: the first `tokens` are loaded into its blocks, and `computed` more were planned behind them;
        None: only those that were before, and what was computed behind the load is computed again."""
        del self.loading[sequence.id]
        if tokens is None:
            self._memory.shrink(sequence)
            self._withdraw(sequence)
        else:
            self._memory.fill(sequence, tokens, computed)
        self._prefill(sequence)

    def _prefill(self, sequence: Sequence) -> None:
        if sequence.phase != "loading":
            self.adapters.start_use(sequence)
        sequence.move("prefilling")
        self.prefilling.add(sequence)
        self._prompts.start(sequence)

    def introduce(self, sequence: Sequence) -> None:
        """Records that the plan being made introduces the sequence to the workers."""
        self.introduced.add(sequence.id)

    def start_hand_over(self, sequence: Sequence) -> None:
        """The sequence's whole prompt is planned, and another engine will continue it."""
        self.prefilling.remove(sequence)
        sequence.move("handing")
        self.handing[sequence.id] = sequence

    def start_decoding(self, sequence: Sequence) -> None:
        """The sequence's whole prompt is planned."""
        self.prefilling.remove(sequence)
        sequence.move("decoding")
        self.decoding.add(sequence)

    def cancel_hand_over(self, sequence: Sequence) -> None:
        """The sequence is decoded here after all, and stays: its saved blocks are named for this one hand-over."""
        sequence.transfer.stay()
        del self.handing[sequence.id]
        sequence.move("decoding")
        self.decoding.add(sequence)

    # ---- leaving

    def forget_names(self, sequence: Sequence) -> None:
        """Keeps other sequences from using the content of its blocks."""
        self._memory.forget_names(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Out of the waiting queue: another engine computes its prompt."""
        if self._loads.enabled:
            self._loads.forget(sequence)
        self.waiting.remove(sequence)
        sequence.move("leaving")

    def remove(self, sequence: Sequence) -> None:
        """Takes `sequence` out, whatever its phase; its blocks are free for the next plan."""
        match sequence.phase:
            case "waiting":
                self.waiting.remove(sequence)
            case "quarantined":
                self.suspects.remove(sequence)
            case "compiling":
                del self.compiling[sequence.id]
                self._grammars.leave(sequence)
            case "seeking":
                del self.seeking[sequence.id]
        if self._loads.enabled:
            self._loads.forget(sequence)
        self.release(sequence)
        del self.by_id[sequence.id]
        if sequence.grammar is not None:
            self.guided -= 1
            self._grammars.end_use(sequence.grammar.key)
        sequence.move("ended")

    def release(self, sequence: Sequence, last: Container[BlockHash] = ()) -> None:
        """Takes a sequence that has blocks from its queue and releases them, those named in `last` behind the others;
        the next plan says so to the workers. Does nothing in phases without blocks."""
        match sequence.phase:
            case "prefilling":
                self.prefilling.remove(sequence)
                for other in self._prompts.stop(sequence):
                    self.resume(other)
            case "decoding":
                self.decoding.remove(sequence)
            case "handing":
                del self.handing[sequence.id]
            case "loading":
                del self.loading[sequence.id]
                self._loads.leave(sequence)
            case _:
                return
        self.adapters.end_use(sequence)
        self._memory.release(sequence, last)
        self._withdraw(sequence)

    def _withdraw(self, sequence: Sequence) -> None:
        """Has the workers remove the sequence with the next plan, if they have it."""
        if sequence.id in self.introduced:
            self.introduced.remove(sequence.id)
            self.released.append(sequence.id)
