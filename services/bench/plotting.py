"""Draws figures to a file; matplotlib is imported when a plot is asked for, and asked for when it is not there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from services.bench.api import ApiError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
INCHES = 4.0
"""Height of a figure, and width of each of its panels."""


def blank_figure(panels: int, panel_width: float = INCHES) -> Figure:
    """Raises ApiError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ApiError("--plot needs matplotlib: pip install 'baton-serve[plot]'") from None
    return Figure(figsize=(panels * panel_width, INCHES), layout="constrained")


def check_plot(path: Path | None) -> None:
    """Before a long measurement rather than after it. Raises ApiError where the plot could not be drawn."""
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise ApiError(f"--plot {path}: its name must end in {', '.join(FORMATS)}")
    blank_figure(1)


def save(figure: Figure, path: Path) -> None:
    """Raises ApiError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ApiError(f"--plot {path}: {error}") from None
