"""The plot of `bench prefixes`: what the shared prefixes are like, and how much of each prompt is a repetition."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from services.bench.core.radix_tree import SharedPrefix
from services.bench.plotting import blank_figure, save

POINTS = 2000


def plot_prefixes(path: Path, unit: str, prefixes: Sequence[SharedPrefix], repeated: Sequence[int]) -> None:
    """Raises ApiError."""
    figure = blank_figure(2)
    left, right = figure.subplots(1, 2)
    left.scatter([p.length for p in prefixes], [p.visits for p in prefixes], s=9, alpha=0.6, linewidths=0)
    if prefixes:
        left.set_yscale("log")
    left.set(xlabel=f"length in {unit}", ylabel="prompts", title=f"{len(prefixes)} shared prefixes")
    lengths, shares = survival(repeated)
    right.step(lengths, shares, where="post")
    right.set(xlabel=f"repeated beginning: at least so many {unit}", ylabel="share of prompts", ylim=(0, 1.02))
    right.set_xlim(left=0)
    right.set_title("what an earlier prompt began with")
    save(figure, path)


def survival(values: Sequence[int]) -> tuple[list[int], list[float]]:
    """Some lengths, ascending, and for each the share of `values` that are at least as large."""
    ordered = sorted(values)
    number = len(ordered)
    places = sorted({round(i * (number - 1) / POINTS) for i in range(POINTS + 1)}) if number else []
    lengths = sorted({ordered[place] for place in places})
    return lengths, [1 - bisect_left(ordered, length) / number for length in lengths]
