"""How many tokens a step may draft for each sequence: from none to what the ranks can, by what drafts cost and bring.

Goodput, tokens per second of the whole step, is what is maximised, after X. Liu et al., "Optimizing Speculative
Decoding for Serving Large Language Models Using Goodput" (SmartSpec), arXiv:2406.14066. There are two questions.

*Whether to draft at all* is answered by trying: steps with drafts and steps without are timed, by the same clock and
with all that belongs to them, and the better mode is kept (`SpeculationController`). No model of the device says what
drafters cost; on small models that is most of it.

*How many*: a step of so many tokens Y in T seconds gains by a draft that takes e seconds more, and is accepted with
probability p, exactly where p > e·Y/T. The j-th draft of a sequence counts only where those before it do, so p = α^j
for an acceptance α of single drafts (Y. Leviathan et al., arXiv:2211.17192). So: as many drafts as α^j stays above
that one threshold, which a small batch on a device that waits for its memory hardly feels (e ≈ 0), and a batch that
fills the device raises to 1. α is each sequence's own, of its latest steps; where there are few, the engine's.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from services.scheduler.core.limits import SpeculationPolicy
from services.scheduler.core.planning.draft_costs import DraftCosts, DraftGain
from services.scheduler.core.sequence import AcceptanceRate, Sequence

ASSUMED_ACCEPTANCE = 0.7
"""Acceptance that is assumed where nothing was tried yet."""
DRAFT_SHARE = 4
"""Of a step's token budget, drafts take at most one in so many: prompts want some of it, too."""
FULL_DRAFTING_SHARE = 0.75
"""Share of the requested drafts from which on a step counts as having all of them."""
MAX_EQUAL_STEPS = 32
"""Steps with as many drafts each, after which one has few."""
MAX_PLAIN_STEPS = 512
"""Steps that wait to be reckoned; those before them would not count any more (`draft_costs.FADE`)."""
CATCH_UP_STEPS = 16
"""Steps that drafters may need to catch up after steps in which no drafts were requested."""
MIN_TRIAL_INTERVAL = 64
"""Steps from one trial to the next, at first."""
MAX_TRIAL_INTERVAL = 1024
"""The same at the most, unless a trial has cost much."""
STEPS_PER_LOST_STEP = 64
"""Steps until the next trial for each that the latest one was worth: so trials take hardly more than a sixtieth of the
time, however poor what is tried."""
BACKOFF, STRONG_BACKOFF = 2, 4
"""After a trial the next one comes so many times later; far later where drafting did poorly beyond doubt."""
TRIAL_SPEED_UP = 4
"""After a change of mode the next trial comes so many times sooner."""
PLAIN_TRIAL_STEPS = 4
"""Steps of a trial not to draft."""
MIN_TRIAL_STEPS, MAX_TRIAL_STEPS = 3, 48
"""Of a trial to draft, that are learnt from, and all together: it goes on while drafting may pay, for all that is
known."""
MAX_DOUBT = 0.12
"""A trial to draft is over when chance leaves no more doubt than this about what drafting brings."""
RESULT_LAG = 4
"""Steps after a trial until all its results are there."""
FRESH_STEPS = 40
"""Steps after a trial in which what it found is still taken for true."""
MIN_GAIN = 0.02
"""Share of a step that drafting must bring for it to become the mode."""
MAX_LOSS_DEVIATIONS = 0.5
"""Standard deviations by which it must lose, for it to be given up."""


class SpeculationController:
    """Owns the mode that steps are in, to draft or not to, and the trial of the other mode that is under way.

    The mode that brings more is kept, and the other is tried for a few steps: soon at first, then more and more seldom,
    as long as trials change nothing. What a trial finds comes in with the results, some steps behind it. No chance is
    involved.
    """

    def __init__(self) -> None:
        self.drafting = False
        """The mode."""
        self.left = 0
        """Steps left of the trial under way, at the most; 0: there is none."""
        self._wait = MIN_TRIAL_INTERVAL
        self._until = 0
        """Steps until the next trial."""
        self._backoff = BACKOFF
        self._lost = 0.0
        """The cost of the present trial to draft, in steps without drafts."""
        self._age = 0
        """Steps since the latest one."""
        self._plain = 0
        """Results in a row of steps without drafts."""

    def record_drafting(self) -> None:
        """The result of a step with drafts."""
        self._plain = 0

    def record_plain(self) -> None:
        """The result of a step without drafts. Where more come than a trial has, no sequence wants drafts any more."""
        self._plain += 1
        if self.drafting and not self.left and self._plain > PLAIN_TRIAL_STEPS + RESULT_LAG:
            self._change_mode()

    def next_drafts(self, gain: DraftGain) -> bool:
        """Whether the step that is planned now drafts. `gain`: what drafting brings, as far as is known."""
        if not self.left:
            self._age += 1
            self._until -= 1
            if self._age > RESULT_LAG:
                self._judge(gain)
            if self._until < 0:
                self._backoff = BACKOFF
                self.left = PLAIN_TRIAL_STEPS if self.drafting else MAX_TRIAL_STEPS
        elif not self.drafting and _has_seen_enough(gain):
            self.left = 1
            self._lost = max(0.0, -gain.mean) * gain.steps
            self._backoff = STRONG_BACKOFF if gain.mean + 2 * gain.doubt < 0.0 else BACKOFF
        return self._next_trial_step() if self.left else self.drafting

    def _judge(self, gain: DraftGain) -> None:
        """Changes the mode; or, where what it was measured against is old, has that measured again."""
        if gain.mean + MAX_LOSS_DEVIATIONS * gain.doubt >= 0.0 if self.drafting else gain.mean <= MIN_GAIN:
            return
        if self._age > FRESH_STEPS:
            self._until = -1
            return
        self._change_mode()

    def _change_mode(self) -> None:
        self.drafting = not self.drafting
        self._age = FRESH_STEPS
        self._wait = self._until = max(MIN_TRIAL_INTERVAL, self._wait // TRIAL_SPEED_UP)

    def _next_trial_step(self) -> bool:
        """Whether the trial's next step drafts."""
        self.left -= 1
        if not self.left:
            self._wait = max(min(self._backoff * self._wait, MAX_TRIAL_INTERVAL), int(STEPS_PER_LOST_STEP * self._lost))
            self._lost = 0.0
            self._age, self._until = 0, self._wait
        return not self.drafting


def _has_seen_enough(gain: DraftGain) -> bool:
    """Whether a trial to draft can end."""
    return gain.steps >= MIN_TRIAL_STEPS and (gain.doubt <= MAX_DOUBT or gain.mean + gain.doubt < 0.0)


class SpeculationBudget:
    """Owns the engine's acceptance and what drafting costs; each sequence has an acceptance of its own."""

    def __init__(self, max_drafts: int, jump_ahead: int, policy: SpeculationPolicy) -> None:
        self._max_drafts = max_drafts
        self._jump_ahead = max(max_drafts, jump_ahead)
        self._policy = policy
        self._costs = DraftCosts()
        self._controller = SpeculationController()
        self._overall = AcceptanceRate()
        self._threshold = 0.0
        self._assumed = ASSUMED_ACCEPTANCE
        self._guesses = False
        """Whether in the step that is planned others draft than those that a grammar forces."""
        self._min_drafts = 0
        """Drafts of each sequence in the step that is planned, however little they promise."""
        self._fixed_lengths: Literal["many", "few"] | None = None
        """The same, whatever they promise; None: as many as pay."""
        self._catching_up = CATCH_UP_STEPS
        """Steps that may pass until drafters are up to date."""
        self._plain_steps: deque[tuple[int, float]] = deque(maxlen=MAX_PLAIN_STEPS)
        """Steps without drafts that are not reckoned yet: their sequences and seconds."""

    def start_step(self, decodes: int, budget: int, *, guided: bool) -> int:
        """A step of `decodes` sequences is planned, with `budget` tokens left: how many drafts it may hold. 0: no
        sequence drafts, and `drafts_for` need not be called. `guided`: whether a sequence has a grammar; only those may
        jump ahead."""
        if not decodes or not (self._jump_ahead if guided else self._max_drafts) or self._policy == "off":
            return 0
        if self._policy == "dynamic" and not self._choose(decodes, guided):
            return 0
        return max(0, min(budget // DRAFT_SHARE, budget - decodes))

    def _choose(self, decodes: int, guided: bool) -> bool:
        """Whether any sequence drafts in the next step; then it is known which, and how much. What a grammar forces is
        drafted though guessing does not pay."""
        self._reckon_plain_steps()
        costs, controller = self._costs, self._controller
        if not costs.plain.covers(decodes):
            return False
        self._guesses = controller.next_drafts(costs.gain(decodes))
        if not self._guesses and (controller.drafting or not guided):
            return False
        self._assumed = self._overall.rate(ASSUMED_ACCEPTANCE)
        threshold = costs.threshold(decodes, self._assumed, self._max_drafts or self._jump_ahead)
        self._threshold = threshold or 0.0
        self._fixed_lengths = self._set_lengths(known=threshold is not None) if self._guesses else None
        self._min_drafts = 1 if self._guesses and not controller.drafting else 0
        return True

    def _set_lengths(self, *, known: bool) -> Literal["many", "few"] | None:
        """Alternates steps with many and with few drafts until the cost of each draft is known. Later, if all steps are
        alike, it has few drafts now and again, so that a change of the cost is noticed."""
        if not known:
            return "many" if self._controller.left % 2 else "few"
        return "few" if self._costs.extra.alike > MAX_EQUAL_STEPS else None

    def drafts_for(self, sequence: Sequence) -> int:
        """Drafts for its next step, if there is room for them."""
        guided = sequence.generation.grammar is not None
        limit = self._jump_ahead if guided else self._max_drafts
        if not limit or self._policy == "fixed":
            return limit
        if not self._guesses and not guided:
            return 0
        rate = sequence.acceptance.rate(ASSUMED_ACCEPTANCE if guided else self._assumed)
        accepted, drafts = rate, 0
        while drafts < limit and accepted > self._threshold:
            drafts += 1
            accepted *= rate
        if not drafts:
            sequence.acceptance.fade()
        if self._fixed_lengths is not None:
            return limit if self._fixed_lengths == "many" else 1
        return max(drafts, self._min_drafts)

    def record_drafts(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """A step tried `drafted` drafts of one sequence, and `accepted` of them were kept."""
        sequence.acceptance.record(drafted, accepted)
        if sequence.generation.grammar is None:
            self._overall.record(drafted, accepted)

    def record_step(self, sequences: int, asked: int, drafted: int, seconds: float, yielded: int) -> None:
        """A step without prompts is over: `asked` drafts were requested, `drafted` were verified, and it took `seconds`
        from the end of the step before to its own; it yielded `yielded` tokens."""
        if not self._jump_ahead or not sequences:
            return
        if not asked:
            self._plain_steps.append((sequences, seconds))
            return
        self._reckon_plain_steps()
        self._controller.record_drafting()
        if not self._controller.drafting and not self._controller.left:  # nothing but what grammars force
            self._catching_up = CATCH_UP_STEPS
        elif self._caught_up(full=drafted >= FULL_DRAFTING_SHARE * asked):
            self._costs.record_drafting(sequences, drafted, yielded - sequences, seconds)

    def _reckon_plain_steps(self) -> None:
        """Takes in the steps without drafts since the last call. Where no sequence can draft, nothing needs them: they
        are reckoned when one comes."""
        while self._plain_steps:
            self._costs.record_plain(*self._plain_steps.popleft())
            self._controller.record_plain()
            self._catching_up = CATCH_UP_STEPS

    def _caught_up(self, *, full: bool) -> bool:
        """Whether a step with drafts is one as all that follow will be. The first one never is."""
        first = self._catching_up == CATCH_UP_STEPS
        self._catching_up = 0 if full and not first else max(0, self._catching_up - 1)
        return not self._catching_up
