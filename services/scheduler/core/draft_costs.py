"""What steps take without drafts, and what drafting adds and brings: sums over recent steps that fade. Pure.

Seconds of a step without drafts are a line over its sequences; what a step with drafts takes beyond that is a line over
its drafts: asking and keeping up, then so much for each draft and the row that verifies it.
"""

from __future__ import annotations

FADE = 0.93
"""What each further step of a kind leaves of the weight of those before it: about 14 steps count."""
LEAST_SPREAD = 0.01
"""Variance of what a line runs over, in squares of its mean, below which its slope is not learnt anew."""
MOST_TIMES = 3.0
"""Of the seconds expected: what takes longer was interrupted, and counts as so much."""
SURE = 2.0
"""Weight of steps from which on something is known of them."""


class Line:
    """Owns a straight line fitted to points that fade."""

    __slots__ = ("_x", "_xx", "_xy", "_y", "slope", "weight")

    def __init__(self) -> None:
        self.weight = self._x = self._y = self._xx = self._xy = 0.0
        self.slope: float | None = None
        """Not negative. Kept while all points have the same x; None: there never were others."""

    def note(self, x: float, y: float) -> None:
        self.weight = self.weight * FADE + 1.0
        self._x = self._x * FADE + x
        self._y = self._y * FADE + y
        self._xx = self._xx * FADE + x * x
        self._xy = self._xy * FADE + x * y
        spread = self._xx * self.weight - self._x * self._x
        if spread > LEAST_SPREAD * self._x * self._x:
            self.slope = max(0.0, (self._xy * self.weight - self._x * self._y) / spread)

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
        self._sequences = Line()
        self._accepted = Line()

    def note_plain(self, sequences: int, seconds: float) -> None:
        if self.plain.covers(sequences):
            seconds = min(seconds, MOST_TIMES * self.plain.at(sequences))
        self.plain.note(sequences, seconds)

    def note_drafting(self, sequences: int, drafted: int, accepted: int, seconds: float) -> None:
        """A step that asked for drafts; `accepted`: of them, all sequences together."""
        plain = self.plain.at(sequences)
        if self.plain.covers(sequences) and self.extra.weight >= SURE:
            seconds = min(seconds, MOST_TIMES * (plain + max(0.0, self.extra.at(drafted))))
        self.extra.note(drafted, seconds - plain)
        self._sequences.note(0.0, sequences)
        self._accepted.note(0.0, accepted)

    @property
    def known(self) -> bool:
        """Whether drafting was tried."""
        return self.extra.weight >= SURE

    def gain(self, sequences: int) -> float:
        """What drafting brings beyond what it costs, each as a share of a step without: positive where it pays."""
        plain = self.plain.at(sequences)
        if plain <= 0.0:
            return 1.0
        return self._accepted.mean / self._sequences.mean - self.extra.mean / plain

    def threshold(self, sequences: int) -> float:
        """Probability of being accepted above which one more draft is worth what it costs, where some are made."""
        seconds = self.plain.at(sequences) + max(0.0, self.extra.mean)
        if seconds <= 0.0 or not self.known:
            return 0.0
        slope = self.extra.slope
        return (0.0 if slope is None else slope) * (sequences + self._accepted.mean) / seconds
