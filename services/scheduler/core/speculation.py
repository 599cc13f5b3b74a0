"""How many tokens a step may draft for each sequence: none to the ranks' most, by what drafts cost and bring.

Goodput, tokens per second of the whole step, is what is maximised, after X. Liu et al., "Optimizing Speculative
Decoding for Serving Large Language Models Using Goodput" (SmartSpec), arXiv:2406.14066. Two questions are asked.

*Whether to draft at all* is answered by trying: steps with drafts and steps without are timed, by the same clock and
with all that belongs to them, and the better course is kept (`trials.py`). No model of the device says what drafters
cost; on small models that is most of it.

*How many*: a step of so many tokens Y in T seconds gains by a draft that takes e seconds more, and is accepted with
probability p, exactly where p > e·Y/T. The j-th draft of a sequence counts only where those before it do, so p = α^j
for an acceptance α of single drafts (Y. Leviathan et al., arXiv:2211.17192). So: as many drafts as α^j stays above
that one threshold, which a small batch on a device that waits for its memory hardly feels (e ≈ 0), and a batch that
fills the device raises to 1. α is each sequence's own, of its latest steps; where there are few, the engine's.
"""

from __future__ import annotations

from typing import Literal

from services.scheduler.core.draft_costs import DraftCosts
from services.scheduler.core.limits import SpeculationPolicy
from services.scheduler.core.sequence import Acceptance, Sequence
from services.scheduler.core.trials import Trials

OPTIMISM = 0.7
"""Acceptance that is assumed where nothing was tried yet."""
DRAFT_SHARE = 4
"""Of a step's token budget, drafts take at most one in so many: prompts want some of it, too."""


MOSTLY = 0.75
"""Share of the drafts that were asked for, from which on a step had most of them."""
ALIKE = 32
"""Steps with as many drafts each, after which one has few."""
CATCHING_UP = 16
"""Steps that drafters may take to come up to date, after some in which they were not asked."""


class Speculation:
    """Owns the engine's acceptance and what drafting costs; each sequence has an acceptance of its own."""

    def __init__(self, most: int, jump_ahead: int, policy: SpeculationPolicy) -> None:
        self._most = most
        self._jump_ahead = max(most, jump_ahead)
        self._policy = policy
        self._costs = DraftCosts()
        self._trials = Trials()
        self._overall = Acceptance()
        self._threshold = 0.0
        self._assumed = OPTIMISM
        self._guesses = False
        """Whether in the step that is planned others draft than those that a grammar forces."""
        self._least = 0
        """Drafts of each sequence in the step that is planned, however little they promise."""
        self._tries: Literal["many", "few"] | None = None
        """The same, whatever they promise; None: as many as pay."""
        self._catching_up = CATCHING_UP
        """Steps that may pass until drafters are up to date."""

    def begin(self, decodes: int, budget: int, *, guided: bool) -> int:
        """A step of so many decodes is planned: how many drafts it may hold; 0 where nobody need be asked. `guided`:
        whether somebody has a grammar, as nobody else may jump ahead."""
        if not decodes or not (self._jump_ahead if guided else self._most) or self._policy == "off":
            return 0
        if self._policy == "dynamic" and not self._choose(decodes, guided):
            return 0
        return max(0, min(budget // DRAFT_SHARE, budget - decodes))

    def _choose(self, decodes: int, guided: bool) -> bool:
        """Whether anybody drafts in the next step; then it is known who, and how much. What a grammar forces is drafted
        though guessing does not pay."""
        costs, trials = self._costs, self._trials
        if not costs.plain.covers(decodes):
            return False
        self._guesses = trials.next(costs.gain(decodes))
        if not self._guesses and (trials.drafting or not guided):
            return False
        self._assumed = self._overall.rate(OPTIMISM)
        threshold = costs.threshold(decodes, self._assumed, self._most or self._jump_ahead)
        self._threshold = threshold or 0.0
        self._tries = self._set_lengths(known=threshold is not None) if self._guesses else None
        self._least = 1 if self._guesses and not trials.drafting else 0
        return True

    def _set_lengths(self, *, known: bool) -> Literal["many", "few"] | None:
        """Steps of many and of few drafts in turn, until it is seen what each one takes; then few now and again, where
        all steps are alike, so that it is seen when that changes."""
        if not known:
            return "many" if self._trials.left % 2 else "few"
        return "few" if self._costs.extra.alike > ALIKE else None

    def wanted(self, sequence: Sequence) -> int:
        """Drafts for its next step, if there is room for them."""
        guided = sequence.generation.grammar is not None
        most = self._jump_ahead if guided else self._most
        if not most or self._policy == "fixed":
            return most
        if not self._guesses and not guided:
            return 0
        rate = sequence.acceptance.rate(OPTIMISM if guided else self._assumed)
        accepted, drafts = rate, 0
        while drafts < most and accepted > self._threshold:
            drafts += 1
            accepted *= rate
        if not drafts:
            sequence.acceptance.fade()
        if self._tries is not None:
            return most if self._tries == "many" else 1
        return max(drafts, self._least)

    def tried(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """What became of a sequence's drafts."""
        sequence.acceptance.note(drafted, accepted)
        if sequence.generation.grammar is None:
            self._overall.note(drafted, accepted)

    def took(self, sequences: int, asked: int, drafted: int, seconds: float, yielded: int) -> None:
        """A step in which everybody decoded is over: `asked` drafts were wanted, `drafted` were tried."""
        if not self._jump_ahead or not sequences:
            return
        if not asked:
            self._costs.note_plain(sequences, seconds)
            self._trials.took_plain()
            self._catching_up = CATCHING_UP
            return
        self._trials.took_drafting()
        if not self._trials.drafting and not self._trials.left:  # nothing but what grammars force
            self._catching_up = CATCHING_UP
        elif self._caught_up(full=drafted >= MOSTLY * asked):
            self._costs.note_drafting(sequences, drafted, yielded - sequences, seconds)

    def _caught_up(self, *, full: bool) -> bool:
        """Whether a step with drafts is one as all that follow will be. The first one never is."""
        first = self._catching_up == CATCHING_UP
        self._catching_up = 0 if full and not first else max(0, self._catching_up - 1)
        return not self._catching_up
