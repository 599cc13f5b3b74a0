"""Who enters with the next step: the first in line, while there is budget, a place, and memory for the whole of it."""

from __future__ import annotations

from typing import assert_never

from services.scheduler.core.kv_memory import KvMemory
from services.scheduler.core.loads import Loads
from services.scheduler.core.next_step import NextStep
from services.scheduler.core.places import Places
from services.scheduler.core.prefills import Prefills
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.shared_prompts import SharedPrompts
from services.scheduler.core.tally import Tally
from shared.blocks import blocks_for


class Newcomers:
    """Owns nothing; takes from the waiting line."""

    def __init__(
        self,
        max_running: int,
        memory: KvMemory,
        places: Places,
        loads: Loads,
        prompts: SharedPrompts,
        prefills: Prefills,
        tally: Tally,
    ) -> None:
        self._max_running = max_running
        self._memory = memory
        self._places = places
        self._loads = loads
        self._prompts = prompts
        self._prefills = prefills
        self._tally = tally

    def admit(self, step: NextStep, now: float) -> None:
        while self._places.running < self._max_running:
            sequence = self._places.waiting.first
            if sequence is None or not self._take_turn(sequence, step, now):
                return

    def _take_turn(self, sequence: Sequence, step: NextStep, now: float) -> bool:
        """What the first in line does now; False where it goes on waiting, and all behind it."""
        concerned = self._loads.concerns(sequence)
        if step.budget <= 0 and not concerned:
            return False
        cached = self._memory.cached_blocks(sequence)
        turn = self._loads.turn(sequence, len(cached), now) if concerned else "compute"
        match turn:
            case "compute" if self._prompts.wait(sequence, len(cached)):
                self._tally.prompts_shared += 1
                self._places.step_aside(sequence)
            case "compute":
                return self._fits(sequence, cached) and self._enter(sequence, cached, step)
            case "load":
                return self._fits(sequence, cached) and self._load(sequence, cached, now)
            case "await":
                self._loads.await_other(sequence, len(cached))
                self._places.step_aside(sequence)
            case "look again":
                if self._loads.look_up(sequence):
                    self._places.step_aside(sequence)
                else:
                    self._loads.forget(sequence)
            case _:
                assert_never(turn)
        return True

    def _fits(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether all known tokens fit, beside what prefills under way still need and a block for everybody running.

        Admitting by the first chunk alone would fill memory with prompts of which none can be finished; and without
        the block for each, a newcomer would be preempted within the next 16 steps.
        """
        pool, places = self._memory.pool, self._places
        coming = (*places.prefilling, *places.loading.values())
        promised = sum(blocks_for(s.length) - len(s.blocks) for s in coming) + places.running
        needed = blocks_for(sequence.length) - len(cached) + pool.idle_among(cached)
        return needed + promised <= pool.free

    def _enter(self, sequence: Sequence, cached: list[int], step: NextStep) -> bool:
        """False where the plan has no room for it."""
        if step.budget <= 0 or not step.has_room_for_news_of(sequence):
            return False
        self._places.enter(sequence, cached)
        self._prefills.prefill(sequence, step)
        return True

    def _load(self, sequence: Sequence, cached: list[int], now: float) -> bool:
        self._places.load(sequence)
        self._loads.begin(sequence, cached, now)
        return True
