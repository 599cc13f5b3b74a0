"""Which of two courses steps take, to draft or not to, and when the other one is tried. Pure, and without chance.

The course that brings more is kept, and the other tried for a few steps: soon at first, then more and more seldom, as
long as trials change nothing. What a trial finds comes in with the results, some steps behind it.
"""

from __future__ import annotations

FIRST_WAIT = 16
"""Steps from one trial to the next, at first."""
LONGEST_WAIT = 1024
"""The same at the most: trials take about a hundredth of the time then, however poor what is tried."""
SOONER = 4
"""After a change of course the next trial comes so many times sooner."""
PLAIN_STEPS = 4
"""Steps of a trial not to draft."""
FULL_STEPS = 4
"""Steps with most of the drafts that were asked for, after which a trial to draft has seen enough."""
DRAFTING_STEPS = 20
"""Steps of a trial to draft at the most: who drafts may have to catch up first."""
LAG = 4
"""Steps after a trial until all its results are there."""
FRESH = 40
"""Steps after a trial in which what it found is still taken for true."""
CONVINCING = 0.02
"""Share of a step that drafting must bring for it to become the course; it remains so while it brings anything."""


class Trials:
    """Owns the course and the trial under way."""

    def __init__(self) -> None:
        self.drafting = False
        """The course."""
        self.left = 0
        """Steps of the trial under way; 0: there is none."""
        self._wait = FIRST_WAIT
        self._until = 0
        """Steps until the next trial."""
        self._age = 0
        """Steps since the latest one."""
        self._full = 0

    def next(self, gain: float | None) -> bool:
        """Whether the step that is planned now drafts. `gain`: what drafting brings; None: it was never tried."""
        if not self.left:
            self._age += 1
            self._until -= 1
            if gain is not None and self._age > LAG:
                self._judge(gain)
            if self._until < 0:
                self._begin()
        return self._go_on() if self.left else self.drafting

    def _judge(self, gain: float) -> None:
        """Changes course; or, where what it was measured against is old, has that measured again."""
        if gain > 0.0 if self.drafting else gain <= CONVINCING:
            return
        if self._age > FRESH:
            self._until = -1
            return
        self.drafting = not self.drafting
        self._age = FRESH
        self._wait = self._until = max(FIRST_WAIT, self._wait // SOONER)

    def _begin(self) -> None:
        self.left = PLAIN_STEPS if self.drafting else DRAFTING_STEPS
        self._full = FULL_STEPS

    def _go_on(self) -> bool:
        """A step of the trial."""
        self.left -= 1
        if not self.left:
            self._age, self._until = 0, self._wait
            self._wait = min(2 * self._wait, LONGEST_WAIT)
        return not self.drafting

    def took(self, *, full: bool) -> None:
        """The result of a step that drafted; `full`: with most of the drafts that were asked for."""
        if full and self.left and not self.drafting:
            self._full -= 1
            if not self._full:
                self.left = 1
