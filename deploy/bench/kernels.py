"""`baton bench kernels`: single kernels beside torch's own operations and the device's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from deploy.bench.character_plot import short
from deploy.bench.measuring import findings
from deploy.bench.roofline_options import parsed_kernels
from deploy.bench.run_lines import against_limits, ceilings_line, columned, machine_line, plain_console
from services.bench.session import write
from services.worker.roofline.findings import Ceilings, Finding, KernelMeasured, KernelSkipped, Started

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

COLUMNS = ("KERNEL", "CASE", "µs", "B/s", "FLOP/s", "OF LIMIT", "TORCH µs", "× TORCH")


@dataclass
class Kernels:
    """All that was found."""

    started: Started | None = None
    ceilings: Ceilings | None = None
    measured: list[KernelMeasured] = field(default_factory=list)
    skipped: list[KernelSkipped] = field(default_factory=list)

    def take(self, finding: Finding) -> None:
        match finding:
            case Started():
                self.started = finding
            case Ceilings():
                self.ceilings = finding
            case KernelMeasured():
                self.measured.append(finding)
            case KernelSkipped():
                self.skipped.append(finding)
            case _:
                raise AssertionError(f"{finding} is no kernel")


def run_kernels(argv: Sequence[str]) -> None:
    """Raises CommandError, or SystemExit for flags that are none."""
    asked, shown = parsed_kernels(argv)
    found, console = Kernels(), plain_console()
    for finding in findings(asked):
        found.take(finding)
        if isinstance(finding, Started) and not shown.as_json:
            console.print(machine_line(finding))
    if shown.result is not None:
        write(shown.result, msgspec.json.encode(described(found)))
    if shown.as_json:
        print(msgspec.json.encode(described(found)).decode())
    elif found.ceilings is not None:
        _conclude(console, found, found.ceilings)


def _conclude(console: Console, found: Kernels, ceilings: Ceilings) -> None:
    console.print(ceilings_line(ceilings), soft_wrap=True)
    console.print()
    console.print(table(found.measured, ceilings))
    for each in found.skipped:
        console.print(f"left out: {each.family} {each.case}: {each.reason}", soft_wrap=True)
    rivals = sorted({f"{each.family}: {each.rival_name}" for each in found.measured if each.rival_name != "torch"})
    for rival in rivals:
        console.print(f"torch of {rival}", soft_wrap=True)


def table(measured: Sequence[KernelMeasured], ceilings: Ceilings) -> RenderableType:
    return columned(COLUMNS, 2, (cells(kernel, ceilings) for kernel in measured))


def cells(kernel: KernelMeasured, ceilings: Ceilings) -> list[str]:
    work, seconds = kernel.work, kernel.ours.median
    rival = kernel.rival
    return [
        kernel.family,
        kernel.case,
        f"{seconds * 1e6:,.1f}",
        short(work.bytes / seconds),
        short(work.flops / seconds) if work.flops else "-",
        f"{ceilings.share(work, seconds):.0%} {ceilings.bound(work)}",
        "-" if rival is None else f"{rival.median * 1e6:,.1f}",
        "-" if rival is None else f"{rival.median / seconds:.2f}",
    ]


def described(found: Kernels) -> dict[str, Any]:
    """For whoever reads JSON."""
    ceilings = found.ceilings
    return {
        "run": found.started,
        "ceilings": ceilings,
        "kernels": [] if ceilings is None else [_described(each, ceilings) for each in found.measured],
        "skipped": [{"family": each.family, "case": each.case, "reason": each.reason} for each in found.skipped],
    }


def _described(kernel: KernelMeasured, ceilings: Ceilings) -> dict[str, Any]:
    work, seconds = kernel.work, kernel.ours.median
    return {
        "family": kernel.family,
        "case": kernel.case,
        "seconds": seconds,
        "best_seconds": kernel.ours.best,
        "runs": kernel.ours.runs,
        "bytes": work.bytes,
        "flops": work.flops,
        **against_limits(work, seconds, ceilings),
        "torch": kernel.rival_name,
        "torch_seconds": None if kernel.rival is None else kernel.rival.median,
    }
