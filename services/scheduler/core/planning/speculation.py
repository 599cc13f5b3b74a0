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
"""Acceptance rate that is assumed until drafts were tried."""
DRAFT_SHARE = 4
"""Drafts take at most the step's token budget divided by this; the rest is for prompts."""
FULL_DRAFTING_SHARE = 0.75
"""Share of the requested drafts from which on a step counts as fully drafted."""
MAX_EQUAL_STEPS = 32
"""Consecutive steps with the same number of drafts, after which one step drafts few."""
MAX_PLAIN_STEPS = 512
"""Steps that wait to be reckoned; those before them would not count any more (`draft_costs.FADE`)."""
CATCH_UP_STEPS = 16
"""Steps that drafters may need to catch up after steps without drafts."""
MIN_TRIAL_INTERVAL = 64
"""Initial number of steps from one trial to the next."""
MAX_TRIAL_INTERVAL = 1024
"""Largest number of steps from one trial to the next, unless a trial was expensive."""
STEPS_PER_LOST_STEP = 64
"""Steps until the next trial, for each step that the latest trial cost: trials take hardly more than a sixtieth of the
time, however bad drafting is."""
BACKOFF, STRONG_BACKOFF = 2, 4
"""Factor on the interval after a trial; the strong one after a trial in which drafting clearly lost."""
TRIAL_SPEED_UP = 4
"""Divisor of the interval after a change of mode."""
PLAIN_TRIAL_STEPS = 4
"""Steps of a trial without drafts."""
MIN_TRIAL_STEPS, MAX_TRIAL_STEPS = 3, 48
"""Fewest steps that a trial with drafts learns from, and most steps that it lasts. It continues while drafting may
still pay."""
MAX_DOUBT = 0.12
"""A trial with drafts ends when the standard deviation of its gain is below this."""
RESULT_LAG = 4
"""Steps after a trial until all its results have arrived."""
FRESH_STEPS = 40
"""Steps after a trial in which its findings still count as current."""
MIN_GAIN = 0.02
"""Gain, as a share of a step, from which on drafting becomes the mode."""
MAX_LOSS_DEVIATIONS = 0.5
"""Drafting is given up if it loses by more than this many standard deviations."""


class SpeculationController:
    """Owns the mode of the steps, drafting or not, and the trial of the other mode.

    The better mode is kept, and the other one is tried for a few steps: soon at first, then less and less often while
    trials change nothing. The findings of a trial arrive with the results, some steps later. Nothing is random.
    """

    def __init__(self) -> None:
        self.drafting = False
        """The mode: whether steps draft outside trials."""
        self.left = 0
        """Steps left of the present trial; 0: there is none."""
        self._wait = MIN_TRIAL_INTERVAL
        self._until = 0
        """Steps until the next trial."""
        self._backoff = BACKOFF
        self._lost = 0.0
        """The cost of the present trial to draft, in steps without drafts."""
        self._age = 0
        """Steps since the latest trial."""
        self._plain = 0
        """Consecutive results of steps without drafts."""

    def record_drafting(self) -> None:
        """Records the result of a step with drafts."""
        self._plain = 0

    def record_plain(self) -> None:
        """Records the result of a step without drafts. If more come than a trial has, no sequence wants drafts any
        more."""
        self._plain += 1
        if self.drafting and not self.left and self._plain > PLAIN_TRIAL_STEPS + RESULT_LAG:
            self._change_mode()

    def next_drafts(self, gain: DraftGain) -> bool:
        """Decides whether the step that is being planned drafts. `gain` is the present estimate of what drafting
        gains."""
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
        """Changes the mode if the other one is better. If the comparison is outdated, starts a trial instead."""
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
    """Whether a trial with drafts can end."""
    return gain.steps >= MIN_TRIAL_STEPS and (gain.doubt <= MAX_DOUBT or gain.mean + gain.doubt < 0.0)


class SpeculationBudget:
    """Owns the engine's acceptance rate and the cost of drafting; each sequence owns its own acceptance rate."""

    def __init__(self, max_drafts: int, jump_ahead: int, policy: SpeculationPolicy, rows_per_draft: int = 1) -> None:
        self.max_drafts = max_drafts
        """Drafts that the ranks can make for a sequence without a grammar; 0: only grammars force some. Of trees, those
        of a path."""
        self._rows_per_draft = rows_per_draft
        self._jump_ahead = max(max_drafts, jump_ahead)
        self._policy = policy
        self._costs = DraftCosts()
        self._controller = SpeculationController()
        self._overall = AcceptanceRate()
        self._threshold = 0.0
        self._assumed = ASSUMED_ACCEPTANCE
        self._guesses = False
        """Whether sequences draft in the planned step beyond what grammars force."""
        self._min_drafts = 0
        """Fewest drafts of each sequence in the planned step, however unlikely their acceptance."""
        self._fixed_lengths: Literal["many", "few"] | None = None
        """Whether every sequence drafts many or few tokens in the planned step, for measuring; None: as many as pay."""
        self._catching_up = CATCH_UP_STEPS
        """Steps that the drafters may still need to catch up."""
        self._plain_steps: deque[tuple[int, float]] = deque(maxlen=MAX_PLAIN_STEPS)
        """Steps without drafts that are not reckoned yet: their sequences and seconds."""

    def start_step(self, decodes: int, budget: int, *, guided: bool) -> int:
        """Plans a step of `decodes` sequences with `budget` tokens left. Returns how many rows of drafts it may hold.
        0: no sequence drafts, and `drafts_for` need not be called. `guided`: whether a sequence has a grammar; only
        those may jump ahead."""
        if not decodes or not (self._jump_ahead if guided else self.max_drafts) or self._policy == "off":
            return 0
        if self._policy == "dynamic" and not self._choose(decodes, guided):
            return 0
        return max(0, min(budget // DRAFT_SHARE, budget - decodes))

    def _choose(self, decodes: int, guided: bool) -> bool:
        """Decides whether any sequence drafts in the next step, and by which rule. Tokens that a grammar forces are
        drafted even if guessing does not pay."""
        self._reckon_plain_steps()
        costs, controller = self._costs, self._controller
        if not costs.plain.covers(decodes):
            return False
        self._guesses = controller.next_drafts(costs.gain(decodes))
        if not self._guesses and (controller.drafting or not guided):
            return False
        self._assumed = self._overall.rate(ASSUMED_ACCEPTANCE)
        threshold = costs.threshold(decodes, self._assumed, self.max_drafts or self._jump_ahead)
        self._threshold = threshold or 0.0
        self._fixed_lengths = self._set_lengths(known=threshold is not None) if self._guesses else None
        self._min_drafts = 1 if self._guesses and not controller.drafting else 0
        return True

    def _set_lengths(self, *, known: bool) -> Literal["many", "few"] | None:
        """Alternates steps with many and few drafts until the cost of a draft is known. Later, if all steps have
        equally many drafts, it lets one step have few, to notice a change of the cost."""
        if not known:
            return "many" if self._controller.left % 2 else "few"
        return "few" if self._costs.extra.alike > MAX_EQUAL_STEPS else None

    def rows_per_draft(self, sequence: Sequence) -> int:
        """Rows of a step that each of its drafts may take: those of a sequence with a grammar are no tree."""
        return 1 if sequence.generation.grammar is not None else self._rows_per_draft

    def drafts_for(self, sequence: Sequence) -> int:
        """Number of drafts for the sequence's next step, if there is room for them."""
        guided = sequence.generation.grammar is not None
        limit = self._jump_ahead if guided else self.max_drafts
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
            sequence.acceptance.decay()
        if self._fixed_lengths is not None:
            return limit if self._fixed_lengths == "many" else 1
        return max(drafts, self._min_drafts)

    def record_drafts(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Records that a step verified `drafted` drafts of one sequence and accepted `accepted`."""
        sequence.acceptance.record(drafted, accepted)
        if sequence.generation.grammar is None:
            self._overall.record(drafted, accepted)

    def record_step(self, sequences: int, asked: int, drafted: int, seconds: float, yielded: int) -> None:
        """Records a finished step without prompts: `asked` drafts were requested and `drafted` verified; it took
        `seconds` from the end of the step before to its own end, and yielded `yielded` tokens."""
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
        """Whether the step is representative of those that follow. The first step with drafts never is."""
        first = self._catching_up == CATCH_UP_STEPS
        self._catching_up = 0 if full and not first else max(0, self._catching_up - 1)
        return not self._catching_up
