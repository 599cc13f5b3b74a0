"""How long prompts and answers are: alike, uniform around a length, or of a distribution between two bounds."""

from __future__ import annotations

from math import ceil, floor
from random import Random
from typing import Literal, NamedTuple, get_args

DistributionKind = Literal["normal", "uniform"]
_DEVIATIONS_BETWEEN_BOUNDS = 6
"""Of a normal distribution: 99.7 % of it is between the bounds."""


def drawn_length(length: int, ratio: float, random: Random) -> int:
    """Uniform between `length` × (1 - `ratio`) and `length` × (1 + `ratio`), 1 at least, as in vLLM's benchmark."""
    return max(1, random.randint(floor(length * (1 - ratio)), ceil(length * (1 + ratio))))


class LengthDistribution(NamedTuple):
    """Lengths from `least` to `most` tokens, both possible."""

    kind: DistributionKind
    least: int
    most: int

    def __str__(self) -> str:
        """As `parse_distribution` reads it."""
        return f"{self.kind}:{self.least}:{self.most}"

    def draw(self, random: Random) -> int:
        """uniform: every length as often. normal: around the middle of the bounds, which are three standard deviations
        away from it; what is drawn beyond them is drawn again."""
        if self.kind == "uniform":
            return random.randint(self.least, self.most)
        middle, deviation = (self.least + self.most) / 2, (self.most - self.least) / _DEVIATIONS_BETWEEN_BOUNDS
        while not self.least <= (length := round(random.gauss(middle, deviation))) <= self.most:
            pass
        return length


def parse_distribution(text: str) -> LengthDistribution:
    """Of `normal:20:500`. Raises ValueError, without words for users, where it is none."""
    kind, least, most = text.split(":")
    found = LengthDistribution(kind, int(least), int(most))  # type: ignore[arg-type]  # see the next line
    if kind not in get_args(DistributionKind) or not 1 <= found.least <= found.most:
        raise ValueError(text)
    return found
