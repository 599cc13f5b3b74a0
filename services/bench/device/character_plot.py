"""A roofline in plain characters: intensity to the right, rate upwards, both logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

MARKS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
SEVERAL = "*"
"""Where points lie upon each other."""


class Point(NamedTuple):
    """One measurement in the plot."""

    intensity: float
    """Arithmetic intensity: operations per byte."""
    rate: float
    """Operations per second."""
    label: str


class Roof(NamedTuple):
    """What the device could do at best."""

    memory: float
    """Memory bandwidth in bytes per second."""
    compute: float
    """Peak compute rate in operations per second."""

    @property
    def ridge(self) -> float:
        """The intensity at which both bind."""
        return self.compute / self.memory

    def at(self, intensity: float) -> float:
        """The highest rate that the limits allow at an intensity, in operations per second."""
        return min(self.compute, intensity * self.memory)


class LogAxis(NamedTuple):
    """A logarithmic axis: its limits, and which cell a value falls into."""

    low: float
    high: float

    def place(self, value: float, cells: int) -> int:
        """Which of `cells` a value falls into; the first or the last where it lies outside."""
        part = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return max(0, min(cells - 1, round(part * (cells - 1))))

    def value(self, cell: int, cells: int) -> float:
        """The value in the middle of a cell."""
        return float(self.low * (self.high / self.low) ** (cell / (cells - 1)))


def ranges(roof: Roof, points: Sequence[Point]) -> tuple[LogAxis, LogAxis]:
    """Both axes, with room for every point and the ridge, in whole powers of two and ten."""
    intensities = [roof.ridge, *(point.intensity for point in points if point.intensity > 0)]
    across = LogAxis(
        2.0 ** (math.floor(math.log2(min(intensities))) - 1), 2.0 ** (math.ceil(math.log2(max(intensities))) + 1)
    )
    rates = [roof.compute, *(point.rate for point in points if point.rate > 0), roof.at(across.low)]
    return across, LogAxis(10.0 ** math.floor(math.log10(min(rates))), 10.0 ** math.ceil(math.log10(max(rates) * 1.05)))


def character_plot(roof: Roof, points: Sequence[Point], width: int = 72, height: int = 20) -> str:
    """Lines of text: the roof, a letter for each point, and what the letters mean."""
    across, up = ranges(roof, points)
    cells = [[" "] * width for _ in range(height)]
    for column in range(width):
        intensity = across.value(column, width)
        cells[up.place(roof.at(intensity), height)][column] = "-" if intensity >= roof.ridge else "/"
    shown = [point for point in points if point.intensity > 0 and point.rate > 0]
    for number, point in enumerate(shown):
        row, column = up.place(point.rate, height), across.place(point.intensity, width)
        free = cells[row][column] not in MARKS + SEVERAL
        cells[row][column] = _mark(number) if free else SEVERAL
    lines = [f"{_label(row, height, up)} |{''.join(cells[row])}" for row in reversed(range(height))]
    lines.append(f"{'':>9} +{'-' * width}")
    lines.append(f"{'':>11}{_axis(across, width)}")
    lines.append(f"{'':>11}{'operations per byte'.center(width).rstrip()}")
    return "\n".join([*lines, "", *_legend(shown, width + 11)])


def _mark(number: int) -> str:
    return MARKS[number] if number < len(MARKS) else "+"


def _label(row: int, height: int, up: LogAxis) -> str:
    """At the bottom, the top and the middle."""
    if row not in (0, height // 2, height - 1):
        return " " * 9
    return f"{short(up.value(row, height)):>5}OP/s"


def _axis(across: LogAxis, width: int) -> str:
    line = [" "] * width
    for part in range(5):
        column = round(part * (width - 1) / 4)
        text = short(across.value(column, width))
        start = max(0, min(width - len(text), column - len(text) // 2))
        line[start : start + len(text)] = text
    return "".join(line).rstrip()


def _legend(points: Sequence[Point], width: int) -> list[str]:
    """Lines of the legend, with as many entries side by side as fit."""
    entries = [f"{_mark(number)} {point.label}" for number, point in enumerate(points)]
    longest = max(map(len, entries), default=0) + 3
    columns = max(1, width // longest) if entries else 1
    return [
        "".join(each.ljust(longest) for each in entries[at : at + columns]).rstrip()
        for at in range(0, len(entries), columns)
    ]


def short(value: float) -> str:
    """With three digits and a prefix: 1.5e12 is 1.5T."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{float(f'{value / size:.3g}'):g}{prefix}"
    return f"{float(f'{value:.3g}'):g}"
