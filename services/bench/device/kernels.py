"""`baton bench kernels`: single kernels beside torch's own operations and the device's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.bench.device.character_plot import short
from services.bench.device.measurement import against_limits, ceilings_line, device_line, findings
from services.bench.device.options import kernels_options
from services.bench.errors import exit_code
from services.bench.report import OutputOptions, Report, Table
from services.worker.measure.roofline.wire import (
    Ceilings,
    Finding,
    KernelMeasured,
    KernelSkipped,
    KernelsRequest,
    MeasureStarted,
)

HEADS = ("kernel", "case", "µs", "B/s", "FLOP/s", "of limit", "torch µs", "× torch")


@dataclass
class KernelFindings:
    """All that was found."""

    started: MeasureStarted | None = None
    ceilings: Ceilings | None = None
    measured: list[KernelMeasured] = field(default_factory=list)
    skipped: list[KernelSkipped] = field(default_factory=list)

    def record(self, finding: Finding) -> None:
        """Keeps one finding. Raises AssertionError for one that is no kernel's."""
        match finding:
            case MeasureStarted():
                self.started = finding
            case Ceilings():
                self.ceilings = finding
            case KernelMeasured():
                self.measured.append(finding)
            case KernelSkipped():
                self.skipped.append(finding)
            case _:
                raise AssertionError(f"{finding} is no kernel")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 where kernels could be measured."""
    request, output = kernels_options(argv)
    return exit_code(lambda: measure(request, output))


def measure(request: KernelsRequest, output: OutputOptions) -> int:
    """The exit code. Raises BenchError where the device cannot be measured."""
    found, report = KernelFindings(), Report(output)
    for finding in findings(request):
        found.record(finding)
        if isinstance(finding, MeasureStarted):
            report.show(device_line(finding))
    report.end(described(found), "" if found.ceilings is None else "\n".join(_lines(found, found.ceilings)))
    return 0


def _lines(found: KernelFindings, ceilings: Ceilings) -> list[str]:
    rows = [cells(kernel, ceilings) for kernel in found.measured]
    lines = [ceilings_line(ceilings), "", *Table(HEADS, rows, names=2).lines()]
    lines += [f"left out: {each.family} {each.case}: {each.reason}" for each in found.skipped]
    rivals = sorted({f"{each.family}: {each.rival_name}" for each in found.measured if each.rival_name != "torch"})
    return lines + [f"torch of {rival}" for rival in rivals]


def cells(kernel: KernelMeasured, ceilings: Ceilings) -> list[str]:
    """A kernel's row of the table."""
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


def described(found: KernelFindings) -> dict[str, Any]:
    """The same as a JSON object."""
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
