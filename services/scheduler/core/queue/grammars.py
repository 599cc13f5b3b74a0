"""Which grammars the workers hold compiled in this epoch, and which sequences wait for the others.

A grammar's text is sent once, beside the steps, and named by its key from then on. The sequences that need it wait
outside the queue, and no others do. What is lost on the way is sent a second time; the workers answer at once for what
they have compiled, so this costs nothing.

Each compiled grammar is a process of the workers, so their number is bounded: the workers are told to forget one that
no sequence follows before they are sent another, and where all are in use the next one waits.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

from services.scheduler.core.counters import EngineCounters
from services.scheduler.core.sequence import Sequence
from shared.ids import GrammarKey, SequenceId
from shared.messages.generation import Grammar
from shared.messages.scheduler import GrammarCompiled, GrammarFault
from shared.reliability.recent import RecentEntries

MAX_REFUSED = 256
"""Grammars of which it is remembered that they cannot be compiled or followed; older ones are tried again."""
MAX_COMPILING = 64
"""Grammars that the workers have been sent and not answered; the next ones wait here."""


@dataclass(slots=True)
class _Compilation:
    grammar: Grammar
    waiting: dict[SequenceId, Sequence]
    since: float = 0.0
    """When the workers were sent it."""
    resend_at: float | None = None
    """When it is sent once more; None where that was done."""


class GrammarOutcome(NamedTuple):
    """A sequence whose grammar is compiled, or (with `error`) is not."""

    sequence: Sequence
    error: str | None
    fault: GrammarFault


class GrammarOrders(NamedTuple):
    """What a plan has the workers do with grammars."""

    compile: tuple[Grammar, ...] = ()
    forget: tuple[GrammarKey, ...] = ()


class Grammars:
    """Owns what became of each grammar, which the workers hold, and the sequences that wait for one."""

    def __init__(self, timeout: float, max_compiled: int, counters: EngineCounters) -> None:
        """`timeout`: seconds from sending a grammar to its reply. `max_compiled`: those that the workers hold."""
        self.unsent: OrderedDict[GrammarKey, _Compilation] = OrderedDict()
        """Grammars that the workers have not been sent yet, and the sequences that wait for each."""
        self.resend: deque[GrammarKey] = deque()
        """Grammars that take so long that they are to be sent once more."""
        self.compiling: dict[GrammarKey, _Compilation] = {}
        """Grammars that the workers have been sent and not answered; written here only, as are those above."""
        self._timeout = timeout
        self._max_compiled = max_compiled
        self._counters = counters
        self._compiled: OrderedDict[GrammarKey, None] = OrderedDict()
        """Those that the workers hold, the ones used last at the end."""
        self._refused: RecentEntries[GrammarKey, str] = RecentEntries(MAX_REFUSED)
        self._users: Counter[GrammarKey] = Counter()
        """Sequences of the engine by their grammar, waiting ones too."""

    @property
    def waiting(self) -> dict[SequenceId, Sequence]:
        """Every sequence that waits for a grammar."""
        groups = (*self.unsent.values(), *self.compiling.values())
        return {number: sequence for group in groups for number, sequence in group.waiting.items()}

    @property
    def answers_awaited(self) -> bool:
        """Whether a sequence waits for a grammar that the workers have been sent."""
        return any(compilation.waiting for compilation in self.compiling.values())

    def error(self, key: GrammarKey) -> str | None:
        """Why it cannot be compiled or followed, where that is known."""
        return self._refused.get(key)

    def start_use(self, key: GrammarKey) -> bool:
        """A sequence with this grammar is in the engine, until `end_use`; whether it may be given to the workers, as
        they hold its grammar. Otherwise it has to `wait`."""
        self._users[key] += 1
        if key not in self._compiled:
            return False
        self._compiled.move_to_end(key)
        return True

    def end_use(self, key: GrammarKey) -> None:
        """The sequence has ended."""
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]

    def wait(self, sequence: Sequence) -> None:
        """The sequence waits for its grammar, until `record_reply` or `expire` names it, or it leaves."""
        grammar, key = _grammar_of(sequence)
        compilation = self.compiling.get(key) or self.unsent.setdefault(key, _Compilation(grammar, {}))
        compilation.waiting[sequence.id] = sequence

    def leave(self, sequence: Sequence) -> None:
        """The sequence has ended. What the workers compile already is kept for others."""
        _, key = _grammar_of(sequence)
        if key in self.compiling:
            self.compiling[key].waiting.pop(sequence.id, None)
        group = self.unsent.get(key)
        if group is not None:
            group.waiting.pop(sequence.id, None)
            if not group.waiting:
                del self.unsent[key]

    def take(self, max_bytes: int, now: float) -> GrammarOrders:
        """What the plan that is being made has compiled, `max_bytes` of text or a single grammar that is longer; and
        what makes room for it."""
        taken: list[Grammar] = []
        forgotten: list[GrammarKey] = []
        while self.resend or (self.unsent and len(self.compiling) < MAX_COMPILING):
            key = self.resend[0] if self.resend else next(iter(self.unsent))
            compilation = self.compiling[key] if self.resend else self.unsent[key]
            max_bytes -= len(compilation.grammar.text.encode())
            if taken and max_bytes < 0:
                break
            if self.resend:
                self.resend.popleft()
            elif not self._make_room(forgotten):
                break
            else:
                del self.unsent[key]
                compilation.since, compilation.resend_at = now, now + self._timeout / 2
                self.compiling[key] = compilation
            taken.append(compilation.grammar)
        return GrammarOrders(tuple(taken), tuple(forgotten))

    def _make_room(self, forgotten: list[GrammarKey]) -> bool:
        """Whether the workers may be sent one more; what they forget for it is added to `forgotten`."""
        while len(self.compiling) + len(self._compiled) >= self._max_compiled:
            idle = next((key for key in self._compiled if key not in self._users), None)
            if idle is None:
                return False
            del self._compiled[idle]
            forgotten.append(idle)
        return True

    def record_reply(self, reply: GrammarCompiled, now: float) -> list[GrammarOutcome]:
        """The workers have compiled it, or (with an error) have not. Returns the sequences that need not wait longer.
        A reply that comes late counts."""
        key = reply.grammar
        if reply.error is None:
            self._compiled[key] = None
            self._refused.pop(key, None)
        elif reply.fault == "refused":
            self._refused[key] = reply.error
        return self._settle(key, reply.error, reply.fault, now)

    def record_failure(self, key: GrammarKey, error: str, fault: GrammarFault) -> None:
        """A sequence that followed it failed."""
        if fault == "refused":
            self._refused[key] = error
        elif fault in ("lost", "died"):
            self._compiled.pop(key, None)

    def expire(self, now: float) -> list[GrammarOutcome]:
        """Resends grammars that take long, and gives up those that take too long; returns the sequences that waited for
        these."""
        over: list[GrammarOutcome] = []
        for key, compilation in list(self.compiling.items()):
            if now - compilation.since > self._timeout:
                error = f"too many are being compiled: this one was not within {self._timeout:g} s; try again later"
                over += self._settle(key, error, "busy", now)
            elif compilation.resend_at is not None and now >= compilation.resend_at:
                compilation.resend_at = None
                self.resend.append(key)
        return over

    def _settle(self, key: GrammarKey, error: str | None, fault: GrammarFault, now: float) -> list[GrammarOutcome]:
        compilation = self.compiling.pop(key, None)
        if compilation is None:
            return []
        if key in self.resend:
            self.resend.remove(key)
        self._count(len(compilation.waiting), error, now - compilation.since)
        return [GrammarOutcome(sequence, error, fault) for sequence in compilation.waiting.values()]

    def _count(self, sequences: int, error: str | None, seconds: float) -> None:
        if error is None:
            self._counters.grammar_waits += sequences
        else:
            self._counters.grammars_refused += sequences
        self._counters.grammar_seconds += sequences * seconds


def _grammar_of(sequence: Sequence) -> tuple[Grammar, GrammarKey]:
    grammar, ref = sequence.generation.grammar, sequence.grammar
    assert grammar is not None, "only who has a grammar waits for one"
    assert ref is not None, "every grammar has a key"
    return grammar, ref.key
