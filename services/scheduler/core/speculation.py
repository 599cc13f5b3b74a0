"""How many tokens a step may draft for each sequence: none to the ranks' most, by what drafts cost and bring.

Goodput, tokens per second of the whole step, is what is maximised, after X. Liu et al., "Optimizing Speculative
Decoding for Serving Large Language Models Using Goodput" (SmartSpec), arXiv:2406.14066. A step of n rows takes a + b·n
seconds and yields Y tokens; one more draft that is accepted with probability p raises Y/(a + b·n) exactly where
p > b·Y/(a + b·n). The j-th draft of a sequence counts only where those before it do, so p = α^j for an acceptance α of
single drafts (Y. Leviathan et al., arXiv:2211.17192). So: as many drafts as α^j stays above that one threshold, which a
small batch on a device that waits for its memory hardly feels (b ≈ 0), and a batch that fills the device raises to 1.

a and b are fitted to the latest steps in which everybody decoded. What drafting itself takes shows in them as costlier
rows. α is each sequence's own, of its latest steps; where there are few, the engine's. What is not tried is not known,
and what was known gets old: steps that have had one size for long are followed by one without drafts, or, where nobody
drafts any more, by one in which a few do.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.core.limits import SpeculationPolicy
from services.scheduler.core.sequence import Acceptance, Sequence

OPTIMISM = 0.7
"""Acceptance that is assumed where nothing was tried yet."""
ROWS_FADE = 0.97
"""What each further step leaves of the weight of those before it, in the fit: about 30 steps count."""
LEAST_SPREAD = 0.001
"""Variance of the rows of recent steps, in squares of their mean, below which they say nothing of what a row costs."""
OTHER_SIZE = 0.1
"""Share of the mean by which a step's rows differ that says something of what a row costs."""
EXPLORE_AFTER = 32
"""Steps of one size, after which one of another is made."""
ALWAYS = -1.0
"""A threshold that every probability is above."""
EXPLORERS = 4
"""One in so many sequences drafts then, where nobody did: about a quarter more rows in one of so many steps."""
DRAFT_SHARE = 4
"""Of a step's token budget, drafts take at most one in so many: prompts want some of it, too."""


@dataclass(slots=True)
class RowCost:
    """Owns the fit of seconds to rows, by sums that fade."""

    weight: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    yielded: float = 0.0
    rows_squared: float = 0.0
    rows_seconds: float = 0.0
    slope: float = 0.0
    """Seconds that a row more takes. Kept while all steps have the same size."""
    alike: int = 0
    """Steps since the last one that differed."""

    def note(self, rows: int, seconds: float, yielded: int) -> None:
        alike = abs(rows * self.weight - self.rows) <= OTHER_SIZE * self.rows
        self.alike = self.alike + 1 if alike else 0
        self.weight = self.weight * ROWS_FADE + 1
        self.rows = self.rows * ROWS_FADE + rows
        self.seconds = self.seconds * ROWS_FADE + seconds
        self.yielded = self.yielded * ROWS_FADE + yielded
        self.rows_squared = self.rows_squared * ROWS_FADE + rows * rows
        self.rows_seconds = self.rows_seconds * ROWS_FADE + rows * seconds
        spread = self.rows_squared * self.weight - self.rows * self.rows
        if spread > LEAST_SPREAD * self.rows * self.rows:
            self.slope = max(0.0, (self.rows_seconds * self.weight - self.rows * self.seconds) / spread)

    @property
    def threshold(self) -> float:
        """Probability of being accepted above which a draft is worth its row."""
        return self.slope * self.yielded / self.seconds if self.seconds > 0 else 0.0


class Speculation:
    """Owns the engine's acceptance and what rows cost; each sequence has an acceptance of its own."""

    def __init__(self, most: int, jump_ahead: int, policy: SpeculationPolicy) -> None:
        self._most = most
        self._jump_ahead = max(most, jump_ahead)
        self._policy = policy
        self._cost = RowCost()
        self._overall = Acceptance()
        self._threshold = 0.0
        self._assumed = OPTIMISM
        self._drafting = False
        """Whether anything was drafted in the latest step."""

    def begin(self, decodes: int, budget: int, *, guided: bool) -> int:
        """A step of so many decodes is planned: how many drafts it may hold; 0 where nobody need be asked. `guided`:
        whether somebody has a grammar, as nobody else may jump ahead."""
        if not (self._jump_ahead if guided else self._most) or self._policy == "off":
            return 0
        self._assumed = self._overall.rate(OPTIMISM)
        room = max(0, min(budget // DRAFT_SHARE, budget - decodes))
        if self._policy == "dynamic" and self._cost.alike >= EXPLORE_AFTER:
            self._cost.alike = 0
            self._threshold = ALWAYS
            return 0 if self._drafting else min(room, max(1, decodes // EXPLORERS))
        self._threshold = self._cost.threshold if self._policy == "dynamic" else ALWAYS
        return room

    def wanted(self, sequence: Sequence) -> int:
        """Drafts for its next step, if there is room for them."""
        most = self._most if sequence.generation.grammar is None else self._jump_ahead
        if not most or self._policy == "fixed":
            return most
        rate = sequence.acceptance.rate(self._assumed)
        accepted, drafts = rate, 0
        while drafts < most and accepted > self._threshold:
            drafts += 1
            accepted *= rate
        if not drafts:
            sequence.acceptance.fade()
        return drafts

    def tried(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """What became of a sequence's drafts."""
        sequence.acceptance.note(drafted, accepted)
        self._overall.note(drafted, accepted)

    def took(self, sequences: int, drafted: int, seconds: float, yielded: int) -> None:
        """A step in which everybody decoded is over. It had a row for each sequence and draft."""
        if not self._jump_ahead or not sequences:
            return
        self._cost.note(sequences + drafted, seconds, yielded)
        self._drafting = drafted > 0
