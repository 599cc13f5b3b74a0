"""Where each sequence stands: in one of three lines, or beside them. Its phase says the same.

waiting → (compiling, seeking, loading) → prefilling → decoding, or handing; back to waiting when it is preempted.
"""

from __future__ import annotations

from services.scheduler.core.grammars import Grammars
from services.scheduler.core.kv_memory import KvMemory
from services.scheduler.core.line import Line
from services.scheduler.core.loads import Loads
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.shared_prompts import SharedPrompts
from shared.ids import SequenceId


class Places:
    """Owns the three lines, who stands beside them, and the sequences in the engine by number."""

    def __init__(self, memory: KvMemory, loads: Loads, grammars: Grammars, prompts: SharedPrompts) -> None:
        self.waiting = Line()
        self.prefilling = Line()
        self.decoding = Line()
        self.compiling: dict[SequenceId, Sequence] = {}
        self.seeking: dict[SequenceId, Sequence] = {}
        self.loading: dict[SequenceId, Sequence] = {}
        self.handing: dict[SequenceId, Sequence] = {}
        self.by_id: dict[SequenceId, Sequence] = {}
        self.guided = 0
        """Sequences with a grammar."""
        self._memory = memory
        self._loads = loads
        self._grammars = grammars
        self._prompts = prompts
        self._released: list[SequenceId] = []

    @property
    def running(self) -> int:
        """Those that have blocks, or are about to be given up to another engine."""
        return len(self.prefilling) + len(self.decoding) + len(self.loading) + len(self.handing)

    @property
    def lined_up(self) -> int:
        """Those that wait for their turn, or beside the line for what they need before it."""
        return len(self.waiting) + len(self.seeking) + len(self.compiling)

    def take_released(self) -> tuple[SequenceId, ...]:
        """Those that the workers know, and may forget with the next plan."""
        released, self._released = self._released, []
        return tuple(released)

    # ---- before their turn

    def accept(self, sequence: Sequence) -> None:
        """A new sequence, into the waiting line; or beside it while its grammar is compiled, or the store is asked what
        it has of it."""
        self.by_id[sequence.id] = sequence
        self.guided += sequence.generation.grammar is not None
        if self._grammars.ready(sequence.generation.grammar):
            self.waiting.add(sequence)
            self._seek(sequence)
        else:
            sequence.move("compiling")
            self.compiling[sequence.id] = sequence
            self._grammars.wait(sequence)

    def compiled(self, sequence: Sequence) -> None:
        """Its grammar is ready."""
        del self.compiling[sequence.id]
        self.wait(sequence)

    def wait(self, sequence: Sequence) -> None:
        """Into the waiting line, with all its tokens known. The store may have what it lacks."""
        sequence.move("waiting")
        self.waiting.add(sequence)
        self._seek(sequence)

    def _seek(self, sequence: Sequence) -> None:
        """Has the store asked what it has of a sequence that waits, where it may have something."""
        if self._loads.look_up(sequence):
            self.step_aside(sequence)

    def step_aside(self, sequence: Sequence) -> None:
        """Out of the line, until it is told to `resume`."""
        self.waiting.remove(sequence)
        sequence.move("seeking")
        self.seeking[sequence.id] = sequence

    def resume(self, sequence: Sequence) -> None:
        """To its place in the line: what it was seeking is known."""
        del self.seeking[sequence.id]
        sequence.move("waiting")
        self.waiting.add(sequence)

    # ---- their turn

    def enter(self, sequence: Sequence, cached: list[int]) -> None:
        """From the waiting line among those that compute their prompts, but for what its `cached` blocks hold."""
        self._loads.forget(sequence)
        self.waiting.remove(sequence)
        self._memory.adopt(sequence, cached)
        self._prefill(sequence)

    def load(self, sequence: Sequence) -> None:
        """From the waiting line to where it is given blocks from the store."""
        self.waiting.remove(sequence)
        sequence.move("loading")
        self.loading[sequence.id] = sequence

    def loaded(self, sequence: Sequence, tokens: int | None) -> None:
        """Its first `tokens` lie computed in its blocks; None: only those that did before."""
        del self.loading[sequence.id]
        if tokens is None:
            self._memory.shrink(sequence)
        else:
            self._memory.fill(sequence, tokens)
        self._prefill(sequence)

    def _prefill(self, sequence: Sequence) -> None:
        sequence.move("prefilling")
        self.prefilling.add(sequence)
        self._prompts.begin(sequence)

    def hand(self, sequence: Sequence) -> None:
        """Its prompt is planned whole, and another engine goes on with it."""
        self.prefilling.remove(sequence)
        sequence.move("handing")
        self.handing[sequence.id] = sequence

    def decode(self, sequence: Sequence) -> None:
        """Its prompt is planned whole."""
        self.prefilling.remove(sequence)
        self._decode(sequence)

    def keep(self, sequence: Sequence) -> None:
        """It is decoded here after all, and for good: what was saved of it bears the name of this one hand-over."""
        sequence.decode_on = None
        del self.handing[sequence.id]
        self._decode(sequence)

    def _decode(self, sequence: Sequence) -> None:
        sequence.move("decoding")
        self.decoding.add(sequence)

    # ---- leaving

    def end(self, sequence: Sequence) -> None:
        """Takes `sequence` out, whatever its phase; its blocks are free for the next plan."""
        if sequence.phase == "waiting":
            self.waiting.remove(sequence)
        elif sequence.phase == "compiling":
            del self.compiling[sequence.id]
            self._grammars.leave(sequence)
        self.seeking.pop(sequence.id, None)
        self._loads.forget(sequence)
        self.release(sequence)
        del self.by_id[sequence.id]
        self.guided -= sequence.generation.grammar is not None
        sequence.move("ended")

    def release(self, sequence: Sequence) -> None:
        """Takes a sequence that has blocks from its place and gives them back; the workers hear with the next plan."""
        match sequence.phase:
            case "prefilling":
                self.prefilling.remove(sequence)
                for other in self._prompts.left(sequence):
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
        self._memory.release(sequence)
        sequence.planned = 0
        if sequence.introduced:
            sequence.introduced = False
            self._released.append(sequence.id)
