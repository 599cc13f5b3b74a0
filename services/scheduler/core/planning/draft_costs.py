"""The time of steps without drafts, and the cost and gain of drafting: fading sums over recent steps. Pure.

The seconds of a step without drafts are a linear function of its sequences. The extra seconds of a step with drafts are
a linear function of its drafts: a fixed cost for running the drafter, then a cost for each draft and the row that
verifies it.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import NamedTuple

FADE = 0.95
"""The factor by which each further step of a kind reduces the weight of earlier ones: about 20 steps count."""
FADE_MEANWHILE, MIN_FADED_WEIGHT = 0.98, 4.0
"""The factor by which a step of the other kind reduces the weight of earlier ones, while it is above
MIN_FADED_WEIGHT."""
FADE_TOKENS = 0.995
"""The factor by which each sequence of a step reduces the weight of earlier yields. Yields vary far more than times, so
more of them are kept."""
MIN_SPREAD = 0.01
"""Variance of the x values, relative to the square of their mean, below which the slope is not fitted again."""
MAX_RATIO = 3.0
"""A step that takes more than this multiple of the expected seconds was interrupted; it counts as this multiple."""
ROUNDS = 3
"""Iterations after which the best rate is accurate enough for its inputs."""
MIN_WEIGHT = 2.0
"""Weight of steps from which on an estimate counts as known."""


class DraftGain(NamedTuple):
    """What drafting gains and what it costs, each as a share of a step without drafts."""

    mean: float
    doubt: float
    """Standard deviation of `mean` that chance leaves; one sequence's yield in one step deviates by about one token."""
    steps: float
    """Weight of the recent steps that it was learnt from."""


class FittedLine:
    """Owns a straight line fitted by least squares to points that lose weight with time."""

    __slots__ = ("_x", "_xx", "_xy", "_y", "alike", "slope", "weight")

    def __init__(self) -> None:
        self.weight = self._x = self._y = self._xx = self._xy = 0.0
        self.slope: float | None = None
        """Slope of the line, never negative. It is kept while all points have the same x; None until two x were
        seen."""
        self.alike = 0
        """Points since the slope was last fitted."""

    def add(self, x: float, y: float) -> None:
        """Adds one point; earlier ones lose weight."""
        self.weight = self.weight * FADE + 1.0
        self._x = self._x * FADE + x
        self._y = self._y * FADE + y
        self._xx = self._xx * FADE + x * x
        self._xy = self._xy * FADE + x * y
        spread = self._xx * self.weight - self._x * self._x
        self.alike += 1
        if spread > MIN_SPREAD * self._x * self._x:
            self.alike = 0
            self.slope = max(0.0, (self._xy * self.weight - self._x * self._y) / spread)

    def decay(self) -> None:
        """Records a step that gave no point: the present points lose weight."""
        if self.weight > MIN_FADED_WEIGHT:
            self.weight *= FADE_MEANWHILE
            self._x *= FADE_MEANWHILE
            self._y *= FADE_MEANWHILE
            self._xx *= FADE_MEANWHILE
            self._xy *= FADE_MEANWHILE

    @property
    def mean(self) -> float:
        """Weighted mean of y over the points; 0 without points."""
        return self._y / self.weight if self.weight else 0.0

    def at(self, x: float) -> float:
        """The line's y at `x`; 0 without points."""
        if not self.weight:
            return 0.0
        return self._y / self.weight + (self.slope or 0.0) * (x - self._x / self.weight)

    def covers(self, x: float) -> bool:
        """Whether points lie near `x`, so that the line can be trusted there."""
        if self.weight < MIN_WEIGHT:
            return False
        mean = self._x / self.weight
        variance = max(0.0, self._xx / self.weight - mean * mean)
        return abs(x - mean) <= mean / 2 or (x - mean) ** 2 <= 4 * variance


class DraftCosts:
    """Owns two lines, the seconds of steps without drafts and what drafts add to them, and what drafting brings."""

    def __init__(self) -> None:
        self.plain = FittedLine()
        """Seconds of a step without drafts, over its number of sequences."""
        self.extra = FittedLine()
        """Seconds beyond `plain`, over the number of drafts."""
        self._sequences = self._accepted = 0.0

    def record_plain(self, sequences: int, seconds: float) -> None:
        """Records a step without drafts, of so many sequences."""
        if self.plain.covers(sequences):
            seconds = min(seconds, MAX_RATIO * self.plain.at(sequences))
        self.plain.add(sequences, seconds)
        self.extra.decay()
        self._record_tokens(sequences, 0, 0)

    def record_drafting(self, sequences: int, drafted: int, accepted: int, seconds: float) -> None:
        """Records a step that verified `drafted` drafts and accepted `accepted`, over all sequences."""
        plain = self.plain.at(sequences)
        if self.extra.weight >= MIN_WEIGHT:
            seconds = min(seconds, MAX_RATIO * (plain + max(0.0, self.extra.at(drafted))))
        self.extra.add(drafted, seconds - plain)
        self.plain.decay()
        self._record_tokens(sequences, sequences, accepted)

    def _record_tokens(self, passed: int, drafting: int, accepted: int) -> None:
        left = FADE_TOKENS**passed
        self._sequences = self._sequences * left + drafting
        self._accepted = self._accepted * left + accepted

    def gain(self, sequences: int) -> DraftGain:
        """What drafting gains in a step of so many sequences. If none was tried, its doubt is infinite."""
        plain = self.plain.at(sequences)
        if plain <= 0.0 or self._sequences < 1.0:
            return DraftGain(0.0, inf, self.extra.weight)
        mean = self._accepted / self._sequences - self.extra.mean / plain
        return DraftGain(mean, 1 / sqrt(self._sequences), self.extra.weight)

    def threshold(self, sequences: int, acceptance: float, max_drafts: int) -> float | None:
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
            while drafts < max_drafts and chance > threshold:
                drafts, brought, chance = drafts + 1, brought + chance, chance * acceptance
            if not drafts:
                break
            seconds = plain + max(0.0, self.extra.at(sequences * drafts))
            threshold = slope * sequences * (1 + brought) / seconds
        return threshold
