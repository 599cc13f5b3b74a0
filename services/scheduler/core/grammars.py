"""Which grammars the workers have compiled, and who waits for the others. One epoch's.

A grammar is sent once, beside the steps; whoever needs it waits out of the line, and nobody else does. What is lost on
the way is asked for a second time; the workers keep what they have compiled, so that this costs nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

from services.scheduler.core.sequence import Sequence
from services.scheduler.core.tally import Tally
from shared.ids import SequenceId
from shared.messages.generation import Grammar

REMEMBERED = 256
"""Grammars of which the outcome is known; those used longest ago are compiled again. The workers keep as many."""
MOST_ASKED = 64
"""Grammars that the workers have been sent and not answered; the next ones wait here."""


@dataclass(slots=True)
class _Asked:
    waiting: dict[SequenceId, Sequence]
    since: float
    again_at: float | None
    """When it is asked for once more; None where that was done."""


class Waited(NamedTuple):
    """A sequence whose grammar is compiled, or (with `error`) cannot be."""

    sequence: Sequence
    error: str | None


class Grammars:
    """Owns the outcome of each grammar that was compiled lately, and the sequences that wait for one."""

    def __init__(self, timeout: float, tally: Tally) -> None:
        self._timeout = timeout
        self._tally = tally
        self._outcomes: OrderedDict[Grammar, str | None] = OrderedDict()
        """None: compiled."""
        self._queued: OrderedDict[Grammar, dict[SequenceId, Sequence]] = OrderedDict()
        """Not sent yet."""
        self._asked: dict[Grammar, _Asked] = {}
        self._again: deque[Grammar] = deque()

    @property
    def waiting(self) -> dict[SequenceId, Sequence]:
        """Everybody who waits."""
        groups = (*self._queued.values(), *(asked.waiting for asked in self._asked.values()))
        return {number: sequence for group in groups for number, sequence in group.items()}

    @property
    def answers_awaited(self) -> bool:
        return any(asked.waiting for asked in self._asked.values())

    @property
    def to_send(self) -> bool:
        return bool(self._again) or (bool(self._queued) and len(self._asked) < MOST_ASKED)

    def ready(self, grammar: Grammar | None) -> bool:
        """Whether a sequence with this one may be given to the workers."""
        if grammar is None:
            return True
        if self._outcomes.get(grammar, "unknown") is not None:
            return False
        self._outcomes.move_to_end(grammar)
        return True

    def error(self, grammar: Grammar | None) -> str | None:
        """Why it cannot be compiled, where that is known."""
        return None if grammar is None else self._outcomes.get(grammar)

    def wait(self, sequence: Sequence) -> None:
        grammar = _of(sequence)
        asked = self._asked.get(grammar)
        group = self._queued.setdefault(grammar, {}) if asked is None else asked.waiting
        group[sequence.id] = sequence

    def leave(self, sequence: Sequence) -> None:
        """It has ended. What the workers compile already is kept for others."""
        grammar = _of(sequence)
        if grammar in self._asked:
            self._asked[grammar].waiting.pop(sequence.id, None)
        group = self._queued.get(grammar)
        if group is not None:
            group.pop(sequence.id, None)
            if not group:
                del self._queued[grammar]

    def take(self, most_bytes: int, now: float) -> tuple[Grammar, ...]:
        """What the plan that is being made has compiled: `most_bytes` of text, or a single grammar that is longer."""
        taken: list[Grammar] = []
        while self.to_send:
            grammar = self._again[0] if self._again else next(iter(self._queued))
            most_bytes -= len(grammar.text.encode())
            if taken and most_bytes < 0:
                break
            taken.append(grammar)
            if self._again:
                self._again.popleft()
            else:
                waiting = self._queued.pop(grammar)
                self._asked[grammar] = _Asked(waiting, now, now + self._timeout / 2)
        return tuple(taken)

    def answered(self, grammar: Grammar, error: str | None, now: float) -> list[Waited]:
        """Who need not wait any longer."""
        self._outcomes[grammar] = error
        self._outcomes.move_to_end(grammar)
        if len(self._outcomes) > REMEMBERED:
            self._outcomes.popitem(last=False)
        asked = self._asked.pop(grammar, None)
        if asked is None:
            return []
        if grammar in self._again:
            self._again.remove(grammar)
        self._note(len(asked.waiting), error, now - asked.since)
        return [Waited(sequence, error) for sequence in asked.waiting.values()]

    def look_at_clock(self, now: float) -> list[Waited]:
        """Asks again for what takes long, and gives up what takes too long."""
        over: list[Waited] = []
        for grammar, asked in list(self._asked.items()):
            if now - asked.since > self._timeout:
                over += self.answered(grammar, f"it does not compile within {self._timeout:g} s", now)
            elif asked.again_at is not None and now >= asked.again_at:
                asked.again_at = None
                self._again.append(grammar)
        return over

    def _note(self, sequences: int, error: str | None, seconds: float) -> None:
        if error is None:
            self._tally.grammar_waits += sequences
        else:
            self._tally.grammars_refused += sequences
        self._tally.grammar_seconds += sequences * seconds


def _of(sequence: Sequence) -> Grammar:
    grammar = sequence.generation.grammar
    assert grammar is not None, "only who has a grammar waits for one"
    return grammar
