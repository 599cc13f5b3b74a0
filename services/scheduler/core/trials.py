"""Which of two courses steps take, to draft or not to, and when the other one is tried. Pure, and without chance.

The course that brings more is kept, and the other tried for a few steps: soon at first, then more and more seldom, as
long as trials change nothing. What a trial finds comes in with the results, some steps behind it.
"""

from __future__ import annotations

from services.scheduler.core.draft_costs import Gain

FIRST_WAIT = 64
"""Steps from one trial to the next, at first."""
LONGEST_WAIT = 1024
"""The same at the most, unless a trial has cost much."""
PER_LOST = 64
"""Steps until the next trial for each that the latest one was worth: so trials take hardly more than a sixtieth of the
time, however poor what is tried."""
RARER, FAR_RARER = 2, 4
"""After a trial the next one comes so many times later; far later where drafting did poorly beyond doubt."""
SOONER = 4
"""After a change of course the next trial comes so many times sooner."""
PLAIN_STEPS = 4
"""Steps of a trial not to draft."""
LEAST_STEPS, MOST_STEPS = 3, 48
"""Of a trial to draft, that are learnt from, and all together: it goes on while drafting may pay, for all that is
known."""
CERTAIN = 0.12
"""A trial to draft is over when chance leaves no more doubt than this about what drafting brings."""
LAG = 4
"""Steps after a trial until all its results are there."""
FRESH = 40
"""Steps after a trial in which what it found is still taken for true."""
CONVINCING = 0.02
"""Share of a step that drafting must bring for it to become the course."""
DOUBTS = 0.5
"""Standard deviations by which it must lose, for it to be given up."""


class Trials:
    """Owns the course and the trial under way."""

    def __init__(self) -> None:
        self.drafting = False
        """The course."""
        self.left = 0
        """Steps of the trial under way, at the most; 0: there is none."""
        self._wait = FIRST_WAIT
        self._until = 0
        """Steps until the next trial."""
        self._rarer = RARER
        self._lost = 0.0
        """What the trial to draft has cost, in steps without drafts."""
        self._age = 0
        """Steps since the latest one."""
        self._plain = 0
        """Results in a row of steps without drafts."""

    def took_drafting(self) -> None:
        """The result of a step with drafts."""
        self._plain = 0

    def took_plain(self) -> None:
        """That of one without. Where more than a trial's come, nobody wants to draft any more."""
        self._plain += 1
        if self.drafting and not self.left and self._plain > PLAIN_STEPS + LAG:
            self._change_course()

    def next(self, gain: Gain) -> bool:
        """Whether the step that is planned now drafts. `gain`: what drafting brings, as far as is known."""
        if not self.left:
            self._age += 1
            self._until -= 1
            if self._age > LAG:
                self._judge(gain)
            if self._until < 0:
                self._rarer = RARER
                self.left = PLAIN_STEPS if self.drafting else MOST_STEPS
        elif not self.drafting and _has_seen_enough(gain):
            self.left = 1
            self._lost = max(0.0, -gain.mean) * gain.steps
            self._rarer = FAR_RARER if gain.mean + 2 * gain.doubt < 0.0 else RARER
        return self._go_on() if self.left else self.drafting

    def _judge(self, gain: Gain) -> None:
        """Changes course; or, where what it was measured against is old, has that measured again."""
        if gain.mean + DOUBTS * gain.doubt >= 0.0 if self.drafting else gain.mean <= CONVINCING:
            return
        if self._age > FRESH:
            self._until = -1
            return
        self._change_course()

    def _change_course(self) -> None:
        self.drafting = not self.drafting
        self._age = FRESH
        self._wait = self._until = max(FIRST_WAIT, self._wait // SOONER)

    def _go_on(self) -> bool:
        """A step of the trial."""
        self.left -= 1
        if not self.left:
            self._wait = max(min(self._rarer * self._wait, LONGEST_WAIT), int(PER_LOST * self._lost))
            self._lost = 0.0
            self._age, self._until = 0, self._wait
        return not self.drafting


def _has_seen_enough(gain: Gain) -> bool:
    """Whether a trial to draft can end."""
    return gain.steps >= LEAST_STEPS and (gain.doubt <= CERTAIN or gain.mean + gain.doubt < 0.0)
