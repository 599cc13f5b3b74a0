"""Memory that runs out under a decoding sequence is taken from whoever stands last in line, who computes it again."""

from __future__ import annotations

from services.scheduler.core.kv_memory import KvMemory
from services.scheduler.core.places import Places
from services.scheduler.core.sequence import Sequence


class Preemption:
    """Owns the count of those that lost their blocks to others."""

    def __init__(self, memory: KvMemory, places: Places) -> None:
        self.count = 0
        self._memory = memory
        self._places = places

    def make_room(self, sequence: Sequence) -> bool:
        """Frees a block from the end of the line; False where that end was `sequence` itself.

        Everybody behind `sequence` is still without work in this step, because decodes are planned in the order of
        the line and prefills after them: so nothing that is planned is taken back.
        """
        while self._memory.pool.free == 0:
            victim = self._last_in_line()
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _last_in_line(self) -> Sequence:
        ends = [line.last for line in (self._places.decoding, self._places.prefilling) if line.last is not None]
        return max(ends, key=lambda sequence: sequence.rank)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes everything from `sequence`. It waits again, once the token on its way (if any) is known."""
        self.count += 1
        self._places.release(sequence)
        if sequence.awaits_token:
            sequence.move("returning")
        else:
            self._places.wait(sequence)
