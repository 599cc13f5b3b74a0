"""What a measurement says first: on what it ran, and what the limits are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.worker.roofline.findings import Ceilings, Started

if TYPE_CHECKING:
    from rich.console import Console

_UNTOLD_WIDTH = 120
"""Characters of a line where there is no terminal."""


def plain_console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _UNTOLD_WIDTH
    return console


def machine_line(started: Started) -> str:
    on = f"{started.model} in {started.dtype} on {started.device}"
    if started.threads is None:
        return on
    busy = "" if started.load_average is None else f", load average {started.load_average:.1f}"
    return f"{on}, {started.threads} threads{busy}"


def ceilings_line(ceilings: Ceilings) -> str:
    memory = ", ".join(f"{name} {rate / 1e9:,.1f} GB/s" for name, rate in ceilings.memory_rates.items())
    matrix = ", ".join(f"{name} {rate / 1e12:,.2f} TFLOP/s" for name, rate in ceilings.matrix_rates.items())
    return f"limits, as measured in this run: {memory}; {matrix}"
