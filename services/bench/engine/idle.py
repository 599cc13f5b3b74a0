"""`bench idle`: the share of its time in which a worker has nothing to do between steps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.bench.engine.process import single_engine
from services.bench.engine.steady_load import IdleFigures, SteadyLoad
from services.bench.options import model_arguments, output_group, output_options, parse
from services.bench.report import Report, Table, machine_line

HEADS = ("device", "run-ahead", "sequences", "step", "tokens/s", "idle", "waiting", "prepare", "answer")
WIDEST = ("device", "run-ahead", "sequences", "000.00 ms", "000,000", "00.0%", "waiting", "prepare", "000.00 ms")
"""Rows are printed as they come: their columns are as wide as these."""


def idle_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags; a bad one is explained, and ends the process with status 2."""
    parser = argparse.ArgumentParser("baton bench idle", description=__doc__)
    model_arguments(parser, "Model directory or repository; by default the demo model.")
    parser.add_argument("--devices", type=_names, default=["cpu", "sim"], help="cpu,cuda,sim")
    parser.add_argument("--run-ahead", type=_numbers, default=[0, 1, 2], help="Plans ahead: 0,1,2")
    parser.add_argument("--sequences", type=_numbers, default=[1, 16, 64, 256], help="That decode at a time.")
    parser.add_argument("--seconds", type=float, default=5.0, help="Of each measurement.")
    parser.add_argument("--sim-step-ms", type=float, default=5.0, help="What a simulated step takes.")
    parser.add_argument("--plan-late", choices=["true", "false"], help="As the scheduler's flag; by default its own.")
    parser.add_argument("--threads", type=int, help="CPU threads of the worker.")
    parser.add_argument("--load-format", choices=["dummy"], help="Random weights: --model may be a shape's name.")
    parser.add_argument("--max-model-len", type=int, help="Tokens.")
    output_group(parser)
    return parse(parser, argv)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= {"cpu", "cuda", "sim"}:
        raise argparse.ArgumentTypeError(f"{text}: devices are cpu, cuda and sim")
    return names


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


async def main(argv: Sequence[str]) -> int:
    """The exit code. Rows are printed, and the file written, as they are measured. Raises BenchError."""
    options = idle_options(argv)
    report, table = Report(output_options(options)), Table(HEADS, [WIDEST])
    name = options.model_name or Path(options.model or "").name
    found: dict[str, Any] = {"model": name, "idle": []}
    report.show(f"{name} on {machine_line()}, {options.seconds:g} s each\n\n{table.head()}")
    for device in options.devices:
        for run_ahead in options.run_ahead:
            scheduler = {"run-ahead": str(run_ahead)}
            if options.plan_late is not None:
                scheduler["plan-late"] = options.plan_late
            worker = _worker(options, device)
            async with single_engine(options.nats_server, scheduler, worker) as (bus, engine, card):
                load = SteadyLoad(bus, engine, card)
                await load.listen()
                for sequences in options.sequences:
                    figures = await load.measure(sequences, options.seconds)
                    report.show(table.row(_cells(device, run_ahead, sequences, figures)))
                    case = {"device": device, "run_ahead": run_ahead, "sequences": sequences}
                    found["idle"].append(case | figures._asdict())
                    report.keep(found)
    report.end(found)
    return 0


def _worker(options: argparse.Namespace, device: str) -> dict[str, str]:
    flags = {"device": device, "max-num-seqs": str(max(options.sequences))}
    if device == "sim":
        flags["sim-step-ms"] = str(options.sim_step_ms)
    given = {
        "model": options.model,
        "threads": options.threads,
        "load-format": options.load_format,
        "max-model-len": options.max_model_len,
    }
    return flags | {name: str(value) for name, value in given.items() if value is not None}


def _cells(device: str, run_ahead: int, sequences: int, figures: IdleFigures) -> list[str]:
    return [
        device,
        str(run_ahead),
        str(sequences),
        f"{figures.step_seconds * 1e3:.2f} ms",
        f"{figures.tokens_per_second:,.0f}",
        f"{figures.idle:.1%}",
        f"{figures.waiting:.1%}",
        f"{figures.prepare:.1%}",
        f"{figures.answer_seconds * 1e3:.2f} ms",
    ]
