"""Which grammars the workers have compiled in this epoch, and which sequences wait for the others.

A grammar is sent once, beside the steps; the sequences that need it wait outside the queue, and no others do. What is
lost on the way is sent a second time; the workers keep what they have compiled, so this costs nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

from services.scheduler.core.counters import EngineCounters
from services.scheduler.core.sequence import Sequence
from shared.ids import SequenceId
from shared.messages.generation import Grammar
from shared.reliability.recent import RecentEntries

MAX_OUTCOMES = 256
"""Grammars of which the outcome is known; those used longest ago are compiled again. The workers keep as many."""
MAX_COMPILING = 64
"""Grammars that the workers have been sent and not answered; the next ones wait here."""


@dataclass(slots=True)
class _Compilation:
    waiting: dict[SequenceId, Sequence]
    since: float
    resend_at: float | None
    """When it is sent once more; None where that was done."""


class GrammarOutcome(NamedTuple):
    """A sequence whose grammar is compiled, or (with `error`) cannot be."""

    sequence: Sequence
    error: str | None


class Grammars:
    """Owns the outcome of each grammar that was compiled lately, and the sequences that wait for one."""

    def __init__(self, timeout: float, counters: EngineCounters) -> None:
        self.unsent: OrderedDict[Grammar, dict[SequenceId, Sequence]] = OrderedDict()
        """Grammars that the workers have not been sent yet, and the sequences that wait for each."""
        self.resend: deque[Grammar] = deque()
        """Grammars that take so long that they are sent again."""
        self.compiling: dict[Grammar, _Compilation] = {}
        """Grammars that were sent to the workers and are not answered yet; only this class writes it, and those
        above."""
        self._timeout = timeout
        self._counters = counters
        self._outcomes: RecentEntries[Grammar, str | None] = RecentEntries(MAX_OUTCOMES)
        """The error of each recent grammar; None: it was compiled."""

    @property
    def waiting(self) -> dict[SequenceId, Sequence]:
        """Every sequence that waits for a grammar."""
        groups = (*self.unsent.values(), *(compilation.waiting for compilation in self.compiling.values()))
        return {number: sequence for group in groups for number, sequence in group.items()}

    @property
    def answers_awaited(self) -> bool:
        """Whether a sequence waits for a grammar that the workers have been sent."""
        return any(compilation.waiting for compilation in self.compiling.values())

    def ready(self, grammar: Grammar) -> bool:
        """Whether the workers have compiled it, so that a sequence with it may be given to them."""
        if self._outcomes.get(grammar, "unknown") is not None:
            return False
        self._outcomes.move_to_end(grammar)
        return True

    def error(self, grammar: Grammar) -> str | None:
        """Why it cannot be compiled, where that is known."""
        return self._outcomes.get(grammar)

    def wait(self, sequence: Sequence) -> None:
        """The sequence waits for its grammar, until `record_reply` or `expire` names it, or it leaves."""
        grammar = _grammar_of(sequence)
        compilation = self.compiling.get(grammar)
        group = self.unsent.setdefault(grammar, {}) if compilation is None else compilation.waiting
        group[sequence.id] = sequence

    def leave(self, sequence: Sequence) -> None:
        """The sequence has ended. What the workers compile already is kept for others."""
        grammar = _grammar_of(sequence)
        if grammar in self.compiling:
            self.compiling[grammar].waiting.pop(sequence.id, None)
        group = self.unsent.get(grammar)
        if group is not None:
            group.pop(sequence.id, None)
            if not group:
                del self.unsent[grammar]

    def take(self, max_bytes: int, now: float) -> tuple[Grammar, ...]:
        """What the plan that is being made has compiled: `max_bytes` of text, or a single grammar that is longer."""
        taken: list[Grammar] = []
        while self.resend or (self.unsent and len(self.compiling) < MAX_COMPILING):
            grammar = self.resend[0] if self.resend else next(iter(self.unsent))
            max_bytes -= len(grammar.text.encode())
            if taken and max_bytes < 0:
                break
            taken.append(grammar)
            if self.resend:
                self.resend.popleft()
            else:
                waiting = self.unsent.pop(grammar)
                self.compiling[grammar] = _Compilation(waiting, now, now + self._timeout / 2)
        return tuple(taken)

    def record_reply(self, grammar: Grammar, error: str | None, now: float) -> list[GrammarOutcome]:
        """The workers have compiled it, or (with `error`) cannot. Returns the sequences that need not wait longer."""
        self._outcomes[grammar] = error
        compilation = self.compiling.pop(grammar, None)
        if compilation is None:
            return []
        if grammar in self.resend:
            self.resend.remove(grammar)
        self._count(len(compilation.waiting), error, now - compilation.since)
        return [GrammarOutcome(sequence, error) for sequence in compilation.waiting.values()]

    def expire(self, now: float) -> list[GrammarOutcome]:
        """Resends grammars that take long, and gives up those that take too long; returns the sequences that waited for
        these."""
        over: list[GrammarOutcome] = []
        for grammar, compilation in list(self.compiling.items()):
            if now - compilation.since > self._timeout:
                over += self.record_reply(grammar, f"it does not compile within {self._timeout:g} s", now)
            elif compilation.resend_at is not None and now >= compilation.resend_at:
                compilation.resend_at = None
                self.resend.append(grammar)
        return over

    def _count(self, sequences: int, error: str | None, seconds: float) -> None:
        if error is None:
            self._counters.grammar_waits += sequences
        else:
            self._counters.grammars_refused += sequences
        self._counters.grammar_seconds += sequences * seconds


def _grammar_of(sequence: Sequence) -> Grammar:
    grammar = sequence.generation.grammar
    assert grammar is not None, "only who has a grammar waits for one"
    return grammar
