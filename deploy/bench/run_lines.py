"""How both measurements show what they found: on what they ran, the limits, rows of figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from services.worker.roofline.findings import Ceilings, Started, Work

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

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


def columned(columns: Sequence[str], words: int, rows: Iterable[Sequence[str]]) -> RenderableType:
    """A table of which the first `words` columns are no numbers."""
    from rich.table import Table

    made = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        made.add_column(column, no_wrap=True, justify="left" if number < words else "right")
    for row in rows:
        made.add_row(*row)
    return made


def against_limits(work: Work, seconds: float, ceilings: Ceilings) -> dict[str, Any]:
    """For whoever reads JSON."""
    return {
        "bytes_per_second": work.bytes / seconds,
        "flops_per_second": work.flops / seconds,
        "bound": ceilings.bound(work),
        "share": ceilings.share(work, seconds),
    }
