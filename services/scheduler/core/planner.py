"""Builds the next step: who computes how many tokens in which blocks. Knows lengths, never token values.

One token budget a step. Decoding sequences first (`decodes.py`), then the rest of chunked prefills (`prefills.py`),
then newcomers (`newcomers.py`); beside them, what is copied to the KV store and what is compiled.
"""

from __future__ import annotations

from typing import NamedTuple

from services.scheduler.core.decodes import Decodes
from services.scheduler.core.grammars import Grammars
from services.scheduler.core.kv_memory import KvMemory
from services.scheduler.core.limits import Limits
from services.scheduler.core.loads import Loads
from services.scheduler.core.micro_batches import MicroBatches
from services.scheduler.core.new_sequences import new_sequence
from services.scheduler.core.newcomers import Newcomers
from services.scheduler.core.next_step import NextStep, Started
from services.scheduler.core.places import Places
from services.scheduler.core.preemption import Preemption
from services.scheduler.core.prefills import Prefills
from services.scheduler.core.saves import BESIDE_DECODES, MOST_BLOCKS, Saves
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.shared_prompts import SharedPrompts
from services.scheduler.core.speculation import Speculation
from services.scheduler.core.steps import Expected
from services.scheduler.core.tally import Tally
from services.scheduler.core.transfers import Transfers
from shared.ids import SequenceId
from shared.messages.generation import Grammar
from shared.messages.worker import NewSequence, Transfer, Work


class Planned(NamedTuple):
    """One step's contents."""

    released: tuple[SequenceId, ...]
    new: tuple[NewSequence, ...]
    work: tuple[Work, ...]
    transfers: tuple[Transfer, ...]
    started: tuple[Started, ...]
    compile: tuple[Grammar, ...]
    handing: tuple[Sequence, ...]
    """Those whose only token it draws: the next ones come from another engine."""
    expected: Expected


class Planner:
    """Owns who computes which prompt, and the turns of micro-batches; the rest belongs to those that plan a part."""

    def __init__(
        self,
        limits: Limits,
        memory: KvMemory,
        transfers: Transfers,
        loads: Loads,
        saves: Saves,
        grammars: Grammars,
        speculation: Speculation,
        tally: Tally,
    ) -> None:
        self.memory = memory
        self._limits = limits
        self._transfers = transfers
        self._saves = saves
        self._grammars = grammars
        self._prompts = SharedPrompts()
        self._micro_batches = MicroBatches(limits.stages)
        self.places = Places(memory, loads, grammars, self._prompts)
        self._preemption = Preemption(memory, self.places)
        self._decodes = Decodes(memory, self.places, self._preemption, speculation, self._micro_batches)
        self._prefills = Prefills(memory, self.places)
        self._newcomers = Newcomers(
            limits.max_running, memory, self.places, loads, self._prompts, self._prefills, tally
        )

    @property
    def preemptions(self) -> int:
        return self._preemption.count

    @property
    def waits_elsewhere(self) -> bool:
        """Whether somebody goes on without any step's result: when the store has answered, when the ranks have copied
        or compiled something."""
        sought = len(self.places.seeking) > self._prompts.waiting
        return bool(sought or self.places.handing or len(self._transfers) or self._grammars.answers_awaited)

    def plan(self, now: float) -> Planned | None:
        """The next step, or None where there is nothing to compute or copy before results come."""
        step = NextStep(self._limits)
        preemptions = self.preemptions
        self._decodes.plan(step)
        decodes = step.samples
        self._prefills.plan(step)
        # Who was preempted just now stands first in line; it would only come back to be preempted again.
        if preemptions == self.preemptions:
            self._newcomers.admit(step, now)
        self._share_filled(step)
        if self._saves.pending:
            self._saves.plan(BESIDE_DECODES if decodes else MOST_BLOCKS, now)
        compile_ = self._grammars.take(step.room_for_news, now)
        if not step.work and not self._transfers.planned and not compile_:
            return None
        return self._planned(step, compile_, prefills=len(step.work) > decodes)

    def _share_filled(self, step: NextStep) -> None:
        """Blocks that the step fills are there for whoever is planned behind it."""
        for sequence in step.filled:
            self.memory.index_full_blocks(sequence)
            for other in self._prompts.progressed(sequence):
                self.places.resume(other)

    def _planned(self, step: NextStep, compile_: tuple[Grammar, ...], *, prefills: bool) -> Planned:
        self._micro_batches.issued(step.work, self.places.by_id)
        tokens = self._limits.max_batch_tokens - step.budget
        return Planned(
            released=self.places.take_released(),
            new=tuple(new_sequence(*start) for start in step.started),
            work=tuple(step.work),
            transfers=self._transfers.take_planned(),
            started=tuple(step.started),
            compile=compile_,
            handing=tuple(step.handing),
            expected=Expected(step.samples, tokens, step.extras, prefills=prefills),
        )
