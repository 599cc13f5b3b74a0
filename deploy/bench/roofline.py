"""`baton bench roofline`: a model's steps beside the device's limits, as a table and as plots."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from deploy.bench.character_plot import Point, Roof, drawn, short
from deploy.bench.measuring import findings
from deploy.bench.roofline_options import Shown, parsed_roofline
from deploy.bench.roofline_plot import plot_roofline
from deploy.bench.run_lines import against_limits, ceilings_line, columned, machine_line, plain_console
from deploy.cli.errors import CommandError
from services.bench.session import write
from services.worker.roofline.findings import (
    Ceilings,
    Finding,
    ModelReady,
    Started,
    StepCase,
    StepMeasured,
    StepSkipped,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

COLUMNS = ("STEP", "ms", "WHOLE ms", "BYTES", "FLOP", "FLOP/B", "B/s", "FLOP/s", "OF LIMIT")
_CACHED = 1.05
"""A share of the memory's rate above this was not reached by the memory."""


@dataclass
class Steps:
    """All that was found."""

    started: Started | None = None
    ceilings: Ceilings | None = None
    model: ModelReady | None = None
    measured: list[StepMeasured] = field(default_factory=list)
    skipped: list[StepSkipped] = field(default_factory=list)

    def take(self, finding: Finding) -> None:
        match finding:
            case Started():
                self.started = finding
            case Ceilings():
                self.ceilings = finding
            case ModelReady():
                self.model = finding
            case StepMeasured():
                self.measured.append(finding)
            case StepSkipped():
                self.skipped.append(finding)
            case _:
                raise AssertionError(f"{finding} is no step")


def run_roofline(argv: Sequence[str]) -> None:
    """Raises CommandError, or SystemExit for flags that are none."""
    asked, shown = parsed_roofline(argv)
    found = Steps()
    _show(found, findings(asked), shown)
    if found.ceilings is None:
        raise CommandError("nothing was measured")
    if shown.result is not None:
        write(shown.result, msgspec.json.encode(described(found)))
    if shown.plot is not None:
        plot_roofline(shown.plot, asked.name, roof_of(found.ceilings), points_of(found.measured))


def _show(found: Steps, coming: Iterable[Finding], shown: Shown) -> None:
    console = plain_console()
    for finding in coming:
        found.take(finding)
        if not shown.as_json:
            _tell(console, found, finding)
    if shown.as_json:
        print(msgspec.json.encode(described(found)).decode())
        return
    _conclude(console, found)


def _tell(console: Console, found: Steps, finding: Finding) -> None:
    """At once what is quick to read; the table comes when it is complete."""
    match finding:
        case Started():
            console.print(machine_line(finding))
        case ModelReady():
            console.print(_model_line(finding), soft_wrap=True)
        case _:
            if sys.stderr.isatty():
                print(f"\r{len(found.measured) + len(found.skipped)} steps", end="", file=sys.stderr, flush=True)


def _conclude(console: Console, found: Steps) -> None:
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    if found.ceilings is None:
        return
    console.print(ceilings_line(found.ceilings), soft_wrap=True)
    console.print()
    console.print(table(found.measured, found.ceilings))
    if any(found.ceilings.share(each.work, each.forward.median) > _CACHED for each in found.measured):
        console.print("above 100%: caches kept what was read, or something slowed the measuring of the limits")
    for each in found.skipped:
        console.print(f"left out: {named(each.case)}: {each.reason}", soft_wrap=True)
    console.print()
    console.print(drawn(roof_of(found.ceilings), points_of(found.measured)), soft_wrap=True, markup=False)


def _model_line(model: ModelReady) -> str:
    kv = model.kv_blocks * model.kv_block_bytes
    decodes = "captured" if model.eager is None else f"run eagerly: {model.eager}"
    return (
        f"{model.ops}: {model.weight_bytes / 1e9:,.2f} GB of weights made in {model.seconds:.1f} s, "
        f"{kv / 1e9:,.2f} GB of KV memory; decodes {decodes}"
    )


def table(measured: Sequence[StepMeasured], ceilings: Ceilings) -> RenderableType:
    return columned(COLUMNS, 1, (cells(step, ceilings) for step in measured))


def cells(step: StepMeasured, ceilings: Ceilings) -> list[str]:
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
    return f"{case.kind} {case.batch} × {tokens(case.context)}"


def tokens(count: int) -> str:
    """4096 is 4k, as one speaks of contexts."""
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def roof_of(ceilings: Ceilings) -> Roof:
    return Roof(ceilings.memory, ceilings.compute)


def points_of(measured: Sequence[StepMeasured]) -> list[Point]:
    return [
        Point(
            step.work.intensity,
            step.work.flops / step.forward.median,
            named(step.case),
        )
        for step in measured
    ]


def described(found: Steps) -> dict[str, Any]:
    """For whoever reads JSON."""
    return {
        "run": found.started,
        "model": found.model,
        "ceilings": found.ceilings,
        "steps": [] if found.ceilings is None else [_described(each, found.ceilings) for each in found.measured],
        "skipped": [
            {"kind": each.case.kind, "batch": each.case.batch, "context": each.case.context, "reason": each.reason}
            for each in found.skipped
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
