"""The one form of every benchmark's result: a head that says what was measured where, figures, and a table of them.

As JSON a result is one object: `command`, `date`, `label`, `machine` and `commit`, and beside them the benchmark's own
figures, under the names of vLLM's benchmarks where it has them. As text it is the frame that users of those know: lines
of title and value, and tables in Markdown.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from services.bench.client.processor_time import CpuShare, by_actor, total
from services.bench.errors import BenchError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 50
"""Characters of the frame."""
FORMATS = (".png", ".svg", ".pdf")
INCHES = 4.0
"""Height of a figure, and width of each of its panels."""
DISTRIBUTION = "baton-serve"
GIT_SECONDS = 5.0


class OutputOptions(NamedTuple):
    """Where a result goes, and in which form."""

    result_file: Path | None
    """Where the JSON is written, too."""
    json: bool
    """Print JSON instead of a table."""
    detailed: bool
    """With every request's figures."""
    progress: bool
    """Show a progress bar."""
    label: str | None
    """The user's own name for the result."""
    command: str
    """The command line, without secrets."""


class Report:
    """Owns one result's head, and shows and writes the result as the options say."""

    def __init__(self, output: OutputOptions) -> None:
        self._output = output
        self.head: dict[str, Any] = {
            "command": output.command,
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "label": output.label,
            "machine": machine(),
            "commit": commit(),
        }

    def show(self, text: str) -> None:
        """Prints a part of the text at once, unless JSON was chosen."""
        if not self._output.json:
            print(text, flush=True)

    def keep(self, figures: Mapping[str, Any]) -> None:
        """Writes the result to the chosen file and replaces its contents; may be called again with more results."""
        if self._output.result_file is not None:
            write_json(self._output.result_file, {**self.head, **figures})

    def end(self, figures: Mapping[str, Any], text: str = "") -> None:
        """Prints `text`, or the JSON, and keeps the result."""
        if self._output.json:
            print(_json({**self.head, **figures}).decode())
        elif text:
            print(text)
        self.keep(figures)


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Folders of the path are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_json(result) + b"\n")


def _json(result: Mapping[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(result), indent=2)


def command_line(program: str, argv: Sequence[str], secret: str | None) -> str:
    """The command line, without `secret` and what URLs hold before their host."""
    shown = shlex.join([*program.split(), *argv])
    if secret:
        shown = shown.replace(secret, "***")
    return re.sub(r"//[^/@\s]*@", "//***@", shown)


def machine() -> dict[str, Any]:
    """The machine that the benchmark itself runs on, and how busy it is as it begins."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def machine_line() -> str:
    """The machine in one line of text."""
    found = machine()
    busy = "" if found["load_average"] is None else f", load average {found['load_average']:.1f}"
    return f"{found['cores']} cores ({found['processor']}){busy}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


@functools.cache
def commit() -> str | None:
    """The checkout's commit, with `-dirty` where files differ from it; where this is installed, its version."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


class Table:
    """Columns of figures in Markdown, as wide as their heads and the rows that are known at first."""

    def __init__(self, heads: Sequence[str], rows: Sequence[Sequence[str]] = (), *, names: int = 1) -> None:
        """The first `names` columns are no numbers: their cells begin at the left."""
        self._heads, self._rows, self._names = heads, rows, names
        self._widths = [max(3, *(len(row[at]) for row in (heads, *rows))) for at in range(len(heads))]

    def head(self) -> str:
        """The two lines above the rows."""
        rules = ("-" * width if at < self._names else f"{'-' * (width - 1)}:" for at, width in enumerate(self._widths))
        return f"{self.row(self._heads)}\n| {' | '.join(rules)} |"

    def row(self, cells: Sequence[str]) -> str:
        """One line; a cell that is wider than its column makes the line longer."""
        aligned = (
            cell.ljust(width) if at < self._names else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, self._widths, strict=True))
        )
        return f"| {' | '.join(aligned)} |"

    def lines(self) -> list[str]:
        """Head and all rows."""
        return [*self.head().split("\n"), *map(self.row, self._rows)]


def rule(title: str, fill: str = "-") -> str:
    """A line of the frame, with a title in it."""
    return f"{title:{fill}^{WIDTH}}"


def line(title: str, value: object) -> str:
    """A title and its value; of numbers with a fraction two digits of it."""
    shown = f"{value:<10.2f}" if isinstance(value, float) else f"{value!s:<10}"
    return f"{title:<40}{shown}".rstrip()


def share_lines(shares: Sequence[CpuShare]) -> list[str]:
    """Processor time by kind of process; nothing where the server's processes are not known."""
    if not shares:
        return []
    rows = [_share_cells(share) for share in (*by_actor(shares), total(shares))]
    return [rule("Server CPU by actor"), *Table(("actor", "s", "us/token", "cores", "sleeps/1k"), rows).lines()]


def _share_cells(share: CpuShare) -> tuple[str, ...]:
    figures = f"{share.us_per_token:.1f}", f"{share.cores:.2f}", f"{share.sleeps_per_1000_tokens:.1f}"
    return (share.name, f"{share.seconds:.2f}", *figures)


def blank_figure(panels: int, panel_width: float = INCHES) -> Figure:
    """Raises BenchError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install 'baton-serve[plot]'") from None
    return Figure(figsize=(panels * panel_width, INCHES), layout="constrained")


def check_plot(path: Path | None) -> None:
    """Before a long measurement rather than after it. Raises BenchError where the plot could not be drawn."""
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise BenchError(f"--plot {path}: its name must end in {', '.join(FORMATS)}")
    blank_figure(1)


def save(figure: Figure, path: Path) -> None:
    """Writes a figure to a file. Raises BenchError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BenchError(f"--plot {path}: {error}") from None
