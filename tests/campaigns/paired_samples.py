"""Two versions measured in turn: whether one is worse than the other beyond what chance does. Pure.

Samples that follow each other have met the same machine, so they are compared in pairs, by the logarithm of their
ratio. Where nothing differs, each pair's ratio is as likely as its inverse: an exact test of all their signs says how
often chance alone gives a mean at least as bad. Several figures are judged together by Holm's method. A change that
does not matter is allowed for first: the test is then whether it is worse by more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import ceil, exp, log, log1p, log2
from random import Random
from statistics import fmean
from typing import Literal, NamedTuple

Better = Literal["higher", "lower"]

MAX_EXACT = 16
"""Pairs whose signs are all tried out; of more a sample is."""
RESAMPLES, BOOTSTRAPS = 10_000, 1_000


class Figure(NamedTuple):
    """What is measured, and when it is better."""

    name: str
    better: Better


class Comparison(NamedTuple):
    """A figure of the new version beside that of the old one."""

    name: str
    ratio: float
    """The geometric mean of new / old."""
    low: float
    high: float
    """Between which 95% of the means lie that resampled pairs have."""
    worse_by_chance: float
    """How often chance alone gives a change for the worse that is at least as great, beside what is allowed."""


def compare(figure: Figure, pairs: Sequence[tuple[float, float]], seed: int = 0, allowed: float = 0.0) -> Comparison:
    """`pairs`: (old, new), each positive. `allowed`: 0.15 tests for what takes more than 1.15 times as long.

    Raises ValueError for fewer than two pairs.
    """
    if len(pairs) < 2:
        raise ValueError(f"{figure.name}: {len(pairs)} pairs are too few; two at least")
    changes = [log(new / old) for old, new in pairs]
    signed = [-change for change in changes] if figure.better == "higher" else changes
    low, high = _interval(changes, Random(seed))
    beyond = [change - log1p(allowed) for change in signed]
    return Comparison(figure.name, exp(fmean(changes)), exp(low), exp(high), _chance(beyond, Random(seed)))


def regressions(comparisons: Sequence[Comparison], error: float) -> list[Comparison]:
    """Those that are worse, where the probability of naming any without a cause is at most `error` (Holm, 1979)."""
    found = []
    for rank, each in enumerate(sorted(comparisons, key=lambda each: each.worse_by_chance)):
        if each.worse_by_chance > error / (len(comparisons) - rank):
            break
        found.append(each)
    return found


def fewest_pairs(figures: int, error: float) -> int:
    """So many pairs can show that one of the figures is worse, where all of them agree."""
    return max(2, ceil(log2(figures / error)))


def _chance(worse: Sequence[float], rng: Random) -> float:
    """The share of all choices of signs under which the sum is at least as great as it is."""
    reached = sum(worse)
    slack = 1e-12 * sum(map(abs, worse))
    if len(worse) <= MAX_EXACT:
        sums = [sum(map(_times, signs, worse)) for signs in product((1, -1), repeat=len(worse))]
        return sum(each >= reached - slack for each in sums) / len(sums)
    hits = sum(sum(each * rng.choice((1, -1)) for each in worse) >= reached - slack for _ in range(RESAMPLES))
    return (hits + 1) / (RESAMPLES + 1)


def _times(sign: int, value: float) -> float:
    return sign * value


def _interval(changes: Sequence[float], rng: Random) -> tuple[float, float]:
    """By the bootstrap, of pairs."""
    means = sorted(fmean(rng.choices(changes, k=len(changes))) for _ in range(BOOTSTRAPS))
    return means[int(0.025 * len(means))], means[int(0.975 * len(means))]


def table(comparisons: Sequence[Comparison], found: Sequence[Comparison]) -> list[str]:
    """In Markdown."""
    lines = ["| figure | new / old | 95% | worse by chance | |", "| --- | ---: | --- | ---: | --- |"]
    for each in comparisons:
        between, said = f"{each.low:.3f} to {each.high:.3f}", "**worse**" if each in found else ""
        lines.append(f"| {each.name} | {each.ratio:.3f} | {between} | {each.worse_by_chance:.4f} | {said} |")
    return lines
