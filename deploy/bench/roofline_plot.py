"""The picture of `baton bench roofline`: both ceilings, and a point for each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deploy.bench.character_plot import Point, Roof, ranges
from deploy.cli.errors import CommandError
from services.bench.api import ApiError
from services.bench.plotting import INCHES, blank_figure, save

_CURVE_POINTS = 200


def plot_roofline(path: Path, title: str, roof: Roof, points: Sequence[Point]) -> None:
    """Raises CommandError."""
    try:
        figure = blank_figure(1, panel_width=2 * INCHES)
        axes = figure.subplots()
        across, up = ranges(roof, points)
        intensities = [across.value(cell, _CURVE_POINTS) for cell in range(_CURVE_POINTS)]
        axes.plot(intensities, [roof.at(each) for each in intensities], color="black", linewidth=1.5)
        axes.axvline(roof.ridge, color="gray", linewidth=0.8, linestyle=":")
        for kind, marker in (("decode", "o"), ("prefill", "s")):
            of_kind = [point for point in points if point.label.startswith(kind)]
            axes.plot([p.intensity for p in of_kind], [p.rate for p in of_kind], marker, markersize=5, label=kind)
        for point in points:
            label = point.label.split(" ", 1)[-1]
            axes.annotate(label, (point.intensity, point.rate), (4, -8), textcoords="offset points", fontsize=6)
        axes.set(xscale="log", yscale="log", xlim=across, ylim=up)
        axes.set(xlabel="operations per byte", ylabel="operations per second", title=title)
        axes.grid(visible=True, which="major", linewidth=0.3)
        axes.legend(loc="lower right", title=f"{roof.memory / 1e9:,.0f} GB/s, {roof.compute / 1e12:,.2f} TFLOP/s")
        save(figure, path)
    except ApiError as error:
        raise CommandError(str(error)) from None
