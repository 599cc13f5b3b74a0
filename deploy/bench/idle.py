"""`baton bench idle`: the share of its time in which a worker has nothing to do between steps, as a Markdown table."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from deploy.bench.engine_alone import engine_alone
from deploy.bench.steps import IdleFigures, SteadyLoad
from deploy.cli.made_up_model import model_folder
from services.bench.session import write
from services.worker.binding import available_cores

HEADER = ("device", "run-ahead", "sequences", "step", "tokens/s", "idle", "waiting", "prepare", "answer")


def run_idle(argv: Sequence[str]) -> None:
    """Raises CommandError, or SystemExit for flags that are none."""
    asyncio.run(_run(_parsed(argv)))


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("baton bench idle", description=__doc__)
    parser.add_argument("--model", help="Model directory or repository; by default the demo model.")
    parser.add_argument("--devices", type=_names, default=["cpu", "sim"], help="cpu,cuda,sim")
    parser.add_argument("--run-ahead", type=_numbers, default=[0, 1, 2], help="Plans ahead: 0,1,2")
    parser.add_argument("--sequences", type=_numbers, default=[1, 16, 64, 256], help="That decode at a time.")
    parser.add_argument("--seconds", type=float, default=5.0, help="Of each measurement.")
    parser.add_argument("--sim-step-ms", type=float, default=5.0, help="What a simulated step takes.")
    parser.add_argument("--plan-late", choices=["true", "false"], help="As the scheduler's flag; by default its own.")
    parser.add_argument("--threads", type=int, help="CPU threads of the worker.")
    parser.add_argument("--load-format", choices=["dummy"], help="Random weights: --model may be a shape's name.")
    parser.add_argument("--max-model-len", type=int, help="Tokens.")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="Write the figures here, too, as they come.")
    return parser.parse_args(argv)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= {"cpu", "cuda", "sim"}:
        raise argparse.ArgumentTypeError(f"{text}: devices are cpu, cuda and sim")
    return names


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


async def _run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="baton-idle-") as made:
        await _measure(options, model_folder(options.model, options.load_format, Path(made)))


async def _measure(options: argparse.Namespace, folder: Path) -> None:
    found: list[dict[str, object]] = []
    print(f"{folder.name} on {_machine()}, {options.seconds:g} s each\n")
    print(_row(HEADER))
    print(_row(["---"] * len(HEADER)))
    for device in options.devices:
        for run_ahead in options.run_ahead:
            scheduler = {"run-ahead": str(run_ahead)}
            if options.plan_late is not None:
                scheduler["plan-late"] = options.plan_late
            async with engine_alone(scheduler, _worker(options, device, str(folder))) as (bus, engine, card):
                load = SteadyLoad(bus, engine, card)
                await load.listen()
                for sequences in options.sequences:
                    figures = await load.measure(sequences, options.seconds)
                    print(_row(_cells(device, run_ahead, sequences, figures)), flush=True)
                    found.append({"device": device, "run_ahead": run_ahead, "sequences": sequences} | figures._asdict())
                    if options.output_json is not None:
                        write(
                            options.output_json, msgspec.json.encode({"model": options.model or "demo", "idle": found})
                        )


def _worker(options: argparse.Namespace, device: str, folder: str) -> dict[str, str]:
    flags = {"model": folder, "device": device, "max-num-seqs": str(max(options.sequences))}
    if device == "sim":
        flags["sim-step-ms"] = str(options.sim_step_ms)
    given = {"threads": options.threads, "load-format": options.load_format, "max-model-len": options.max_model_len}
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


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _machine() -> str:
    return f"{available_cores()} cores ({_processor()}), load {os.getloadavg()[0]:.1f}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
