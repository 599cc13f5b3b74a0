"""`baton bench kernels`: single kernels beside torch's own operations and the device's limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict

from services.bench.device.character_plot import short
from services.bench.device.measurement import Findings, against_limits, ceilings_line, device_line, findings
from services.bench.device.options import kernels_options
from services.bench.report import Report, Table
from services.worker.measure.roofline.wire import Ceilings, KernelMeasured, KernelSkipped, MeasureStarted

HEADS = ("kernel", "case", "µs", "B/s", "FLOP/s", "of limit", "torch µs", "× torch")


def main(argv: Sequence[str]) -> int:
    """The exit code: 0 where kernels could be measured. Raises BenchError where the device cannot be measured."""
    request, output = kernels_options(argv)
    found, report = Findings(), Report(output)
    for finding in findings(request):
        found.record(finding)
        if isinstance(finding, MeasureStarted):
            report.show(device_line(finding))
    ceilings = found.first(Ceilings)
    report.end(described(found), "" if ceilings is None else "\n".join(_lines(found, ceilings)))
    return 0


def _lines(found: Findings, ceilings: Ceilings) -> list[str]:
    measured = found.all(KernelMeasured)
    rows = [cells(kernel, ceilings) for kernel in measured]
    lines = [ceilings_line(ceilings), "", *Table(HEADS, rows, names=2).lines()]
    lines += [f"left out: {each.family} {each.case}: {each.reason}" for each in found.all(KernelSkipped)]
    rivals = sorted({f"{each.family}: {each.rival_name}" for each in measured if each.rival_name != "torch"})
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


def described(found: Findings) -> dict[str, Any]:
    """The same as a JSON object."""
    ceilings = found.first(Ceilings)
    return {
        "run": found.first(MeasureStarted),
        "ceilings": ceilings,
        "kernels": [] if ceilings is None else [_described(each, ceilings) for each in found.all(KernelMeasured)],
        "skipped": [asdict(each) for each in found.all(KernelSkipped)],
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
