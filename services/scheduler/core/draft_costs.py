"""What steps take without drafts, and what drafting adds and brings: sums over recent steps that fade. Pure.

Seconds of a step without drafts are a line over its sequences; what a step with drafts takes beyond that is a line over
its drafts: asking and keeping up, then so much for each draft and the row that verifies it.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import NamedTuple

FADE = 0.95
"""What each further step of a kind leaves of the weight of those before it: about 20 steps count."""
FADE_MEANWHILE, OLD = 0.98, 4.0
"""The same for a step of the other kind, as long as more than OLD steps count."""
FADE_TOKENS = 0.995
"""The same for each sequence of any step, of what drafts bring: chance makes that waver far more than time."""
LEAST_SPREAD = 0.01
"""Variance of what a line runs over, in squares of its mean, below which its slope is not learnt anew."""
MOST_TIMES = 3.0
"""Of the seconds expected: what takes longer was interrupted, and counts as so much."""
ROUNDS = 3
"""After which the best rate is found, as good as what it is reckoned from."""
SURE = 2.0
"""Weight of steps from which on something is known of them."""


class Gain(NamedTuple):
    """What drafting brings beyond what it costs, each as a share of a step without it."""

    mean: float
    doubt: float
    """The standard deviation that tokens' chances leave it: of one sequence's yield in one step it is about a token."""
    steps: float
    """It was learnt from, lately."""


class Line:
    """Owns a straight line fitted to points that fade."""

    __slots__ = ("_x", "_xx", "_xy", "_y", "alike", "slope", "weight")

    def __init__(self) -> None:
        self.weight = self._x = self._y = self._xx = self._xy = 0.0
        self.slope: float | None = None
        """Not negative. Kept while all points have the same x; None: there never were others."""
        self.alike = 0
        """Points since the slope was learnt."""

    def note(self, x: float, y: float) -> None:
        self.weight = self.weight * FADE + 1.0
        self._x = self._x * FADE + x
        self._y = self._y * FADE + y
        self._xx = self._xx * FADE + x * x
        self._xy = self._xy * FADE + x * y
        spread = self._xx * self.weight - self._x * self._x
        self.alike += 1
        if spread > LEAST_SPREAD * self._x * self._x:
            self.alike = 0
            self.slope = max(0.0, (self._xy * self.weight - self._x * self._y) / spread)

    def grow_old(self) -> None:
        """Another step has passed, of which there is no point."""
        if self.weight > OLD:
            self.weight *= FADE_MEANWHILE
            self._x *= FADE_MEANWHILE
            self._y *= FADE_MEANWHILE
            self._xx *= FADE_MEANWHILE
            self._xy *= FADE_MEANWHILE

    @property
    def mean(self) -> float:
        return self._y / self.weight if self.weight else 0.0

    def at(self, x: float) -> float:
        """As far as is known; 0 where nothing is."""
        if not self.weight:
            return 0.0
        return self.mean + (self.slope or 0.0) * (x - self._x / self.weight)

    def covers(self, x: float) -> bool:
        """Whether points lie about there, so that their line can be trusted to."""
        if self.weight < SURE:
            return False
        mean = self._x / self.weight
        variance = max(0.0, self._xx / self.weight - mean * mean)
        return abs(x - mean) <= mean / 2 or (x - mean) ** 2 <= 4 * variance


class DraftCosts:
    """Owns both lines, and what drafting brings."""

    def __init__(self) -> None:
        self.plain = Line()
        """Over sequences."""
        self.extra = Line()
        """Over drafts: seconds beyond `plain`."""
        self._sequences = self._accepted = 0.0

    def note_plain(self, sequences: int, seconds: float) -> None:
        if self.plain.covers(sequences):
            seconds = min(seconds, MOST_TIMES * self.plain.at(sequences))
        self.plain.note(sequences, seconds)
        self.extra.grow_old()
        self._note_tokens(sequences, 0, 0)

    def note_drafting(self, sequences: int, drafted: int, accepted: int, seconds: float) -> None:
        """A step that asked for drafts; `accepted`: of them, all sequences together."""
        plain = self.plain.at(sequences)
        if self.extra.weight >= SURE:
            seconds = min(seconds, MOST_TIMES * (plain + max(0.0, self.extra.at(drafted))))
        self.extra.note(drafted, seconds - plain)
        self.plain.grow_old()
        self._note_tokens(sequences, sequences, accepted)

    def _note_tokens(self, passed: int, drafting: int, accepted: int) -> None:
        left = FADE_TOKENS**passed
        self._sequences = self._sequences * left + drafting
        self._accepted = self._accepted * left + accepted

    def gain(self, sequences: int) -> Gain:
        plain = self.plain.at(sequences)
        if plain <= 0.0 or self._sequences < 1.0:
            return Gain(0.0, inf, self.extra.weight)
        mean = self._accepted / self._sequences - self.extra.mean / plain
        return Gain(mean, 1 / sqrt(self._sequences), self.extra.weight)

    def threshold(self, sequences: int, acceptance: float, most: int) -> float | None:
        """Probability of being accepted above which one more draft is worth what it costs, where all draft as many as
        are worth theirs. None: nothing is known of what a draft costs.

        The best rate of tokens is found after W. Dinkelbach, "On nonlinear fractional programming" (1967): what is
        worth its cost at one rate gives a higher one, until that is the best.
        """
        plain, slope = self.plain.at(sequences), self.extra.slope
        if slope is None or plain <= 0.0:
            return None
        threshold = slope * sequences / plain
        for _ in range(ROUNDS):
            drafts, brought, chance = 0, 0.0, acceptance
            while drafts < most and chance > threshold:
                drafts, brought, chance = drafts + 1, brought + chance, chance * acceptance
            if not drafts:
                break
            seconds = plain + max(0.0, self.extra.at(sequences * drafts))
            threshold = slope * sequences * (1 + brought) / seconds
        return threshold
