"""`baton bench roofline`: a model's steps beside the device's limits, as a table and as plots."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.bench.device.character_plot import Point, Roof, character_plot, ranges, short
from services.bench.device.measurement import Findings, against_limits, ceilings_line, device_line, findings
from services.bench.device.options import roofline_options
from services.bench.errors import BenchError
from services.bench.report import INCHES, Report, Table, blank_figure, save
from services.worker.measure.roofline.wire import (
    Ceilings,
    Finding,
    MeasureStarted,
    ModelReady,
    StepCase,
    StepMeasured,
    StepSkipped,
)

HEADS = ("step", "ms", "whole ms", "bytes", "FLOP", "FLOP/B", "B/s", "FLOP/s", "of limit")
_CACHED = 1.05
"""A share of the memory's rate above this was not reached by the memory."""


def main(argv: Sequence[str]) -> int:
    """The exit code: 0 where steps could be measured. Raises BenchError where the device cannot be measured, or the
    plot not be drawn."""
    request, output, plot = roofline_options(argv)
    found, report = Findings(), Report(output)
    for finding in findings(request):
        found.record(finding)
        _show(report, found, finding)
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    ceilings = found.first(Ceilings)
    if ceilings is None:
        raise BenchError("nothing was measured")
    report.end(described(found), "\n".join(_lines(found, ceilings)))
    if plot is not None:
        plot_roofline(plot, request.name, roof_of(ceilings), points_of(found.all(StepMeasured)))
    return 0


def _show(report: Report, found: Findings, finding: Finding) -> None:
    """At once what is quick to read; the table comes when it is complete."""
    match finding:
        case MeasureStarted():
            report.show(device_line(finding))
        case ModelReady():
            report.show(_model_line(finding))
        case _:
            if sys.stderr.isatty():
                steps = len(found.all(StepMeasured)) + len(found.all(StepSkipped))
                print(f"\r{steps} steps", end="", file=sys.stderr, flush=True)


def _lines(found: Findings, ceilings: Ceilings) -> list[str]:
    measured = found.all(StepMeasured)
    rows = [cells(step, ceilings) for step in measured]
    lines = [ceilings_line(ceilings), "", *Table(HEADS, rows).lines()]
    if any(ceilings.share(each.work, each.forward.median) > _CACHED for each in measured):
        lines.append("above 100%: caches kept what was read, or something slowed the measuring of the limits")
    lines += [f"left out: {named(each.case)}: {each.reason}" for each in found.all(StepSkipped)]
    return [*lines, "", character_plot(roof_of(ceilings), points_of(measured))]


def _model_line(model: ModelReady) -> str:
    kv = model.kv_blocks * model.kv_block_bytes
    decodes = "captured" if model.eager is None else f"run eagerly: {model.eager}"
    return (
        f"{model.ops}: {model.weight_bytes / 1e9:,.2f} GB of weights made in {model.seconds:.1f} s, "
        f"{kv / 1e9:,.2f} GB of KV memory; decodes {decodes}"
    )


def cells(step: StepMeasured, ceilings: Ceilings) -> list[str]:
    """A step's row of the table."""
    work, seconds = step.work, step.forward.median
    return [
        named(step.case),
        f"{seconds * 1e3:,.2f}",
        "-" if step.whole is None else f"{step.whole.median * 1e3:,.2f}",
        short(work.bytes),
        short(work.flops),
        short(work.intensity),
        short(work.bytes / seconds),
        short(work.flops / seconds),
        f"{ceilings.share(work, seconds):.0%} {ceilings.bound(work)}",
    ]


def named(case: StepCase) -> str:
    """A step by its kind, batch size and context length: `decode 16 × 4k`."""
    return f"{case.kind} {case.batch} × {tokens(case.context)}"


def tokens(count: int) -> str:
    """4096 is 4k, as one speaks of contexts."""
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def roof_of(ceilings: Ceilings) -> Roof:
    """The limits that the plots draw."""
    return Roof(ceilings.memory, ceilings.compute)


def points_of(measured: Sequence[StepMeasured]) -> list[Point]:
    """A point for each step: intensity over rate."""
    return [Point(step.work.intensity, step.work.flops / step.forward.median, named(step.case)) for step in measured]


def described(found: Findings) -> dict[str, Any]:
    """The same as a JSON object."""
    ceilings = found.first(Ceilings)
    return {
        "run": found.first(MeasureStarted),
        "model": found.first(ModelReady),
        "ceilings": ceilings,
        "steps": [] if ceilings is None else [_described(each, ceilings) for each in found.all(StepMeasured)],
        "skipped": [
            {"kind": each.case.kind, "batch": each.case.batch, "context": each.case.context, "reason": each.reason}
            for each in found.all(StepSkipped)
        ],
    }


def _described(step: StepMeasured, ceilings: Ceilings) -> dict[str, Any]:
    work, seconds = step.work, step.forward.median
    return {
        "kind": step.case.kind,
        "batch": step.case.batch,
        "context": step.case.context,
        "seconds": seconds,
        "best_seconds": step.forward.best,
        "runs": step.forward.runs,
        "whole_seconds": None if step.whole is None else step.whole.median,
        "weight_bytes": step.weight_bytes,
        "kv_read_bytes": step.kv_read_bytes,
        "kv_written_bytes": step.kv_written_bytes,
        "bytes": work.bytes,
        "flops": work.flops,
        "intensity": work.intensity,
        **against_limits(work, seconds, ceilings),
        "share_of_copy": work.bytes / seconds / ceilings.memory_rates["copy"],
    }


# The picture of `baton bench roofline`: both ceilings, and a point for each step.


_CURVE_POINTS = 200


def plot_roofline(path: Path, title: str, roof: Roof, points: Sequence[Point]) -> None:
    """Draws both ceilings, and a point for each step. Raises BenchError."""
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
