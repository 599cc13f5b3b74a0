"""`baton chaos`: how it is typed, and its way from a stack's start to the report."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.running_stack import AsJson
from deploy.cli.up.options import given, offers, set_option, with_options
from deploy.errors import CommandError

if TYPE_CHECKING:
    from deploy.chaos.faults.fault import Fault
    from deploy.chaos.run import ChaosOptions, RoundResult
    from deploy.chaos.schedule import Strike
    from deploy.chaos.stack import ChaosStack, Need
    from services.bench.report import Report

STACK = "The stack that it starts"
STACK_OPTIONS = (
    "model",
    "device",
    "engines",
    "tp",
    "pp",
    "prefill",
    "decode",
    "gateways",
    "tokenizers",
    "detokenizers",
    "coordinators",
    "kvstore_memory",
    "redis",
    "wait_for_engines_s",
)
"""Options of `baton up` that also say what stack is taken apart; every other setting is given by --set."""


def chaos(
    faults: Annotated[str | None, typer.Option(help="FAULT or FAULT:TARGET, as kill,cut:bus. Default: all.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed is the same schedule.")] = 0,
    duration: Annotated[float, typer.Option(min=1, help="Seconds; the last round is finished.")] = 180.0,
    passes: Annotated[int | None, typer.Option(min=1, help="Every fault so many times, instead of --duration.")] = None,
    streams: Annotated[int, typer.Option(min=1, max=256, help="Clients, each with one open stream.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="Output tokens of each request.")] = 80,
    output_json: Annotated[Path | None, typer.Option(help="Write the result here, as JSON.")] = None,
    as_json: AsJson = False,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the stack keeps its logs and state. Default: removed at the end.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        set_option("SERVICE.KEY=VALUE, any setting of a service.", STACK),
    ] = None,
    in_namespaces: Annotated[bool, typer.Option("--in-namespaces", hidden=True)] = False,
    **typed: Any,
) -> None:
    """Take a stack of this command's own apart under load, fault by fault, and check that no stream is lost or altered.

    Ends with status 1 where a stream was lost or altered, something stayed held, or a process did not come back.
    """
    from deploy.chaos.faults.choice import chosen_faults, needs_of
    from deploy.chaos.report import text
    from deploy.chaos.run import ChaosOptions
    from deploy.chaos.stack import chaos_stack
    from deploy.model_choice import model_directory
    from services.bench.report import OutputOptions, Report

    chosen = chosen_faults(faults)
    needs, values = needs_of(chosen), given(typed)
    if not in_namespaces:
        needs = _needs_outside_namespaces(needs)
    model = model_directory(values.pop("model", None)) if "model copy" in needs else None
    argv = [*_up_options(values), *(f"--set={each}" for each in settings or ())]
    report = Report(OutputOptions(output_json, as_json, False, False, None, _typed_command()))
    options = ChaosOptions(seed, duration, streams, tokens, passes)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the stack ends with this command, however it is ended
    with chaos_stack(argv, run_dir, needs, model) as stack:
        result = asyncio.run(_taken_apart(stack, chosen, options, report, {"seed": seed, "stack": argv}))
    report.end(result, text(result))
    if result["problems"] or not result["rounds"]:
        raise SystemExit(1)


async def _taken_apart(
    stack: ChaosStack,
    chosen: Mapping[Fault, frozenset[str]],
    options: ChaosOptions,
    report: Report,
    head: dict[str, Any],
) -> dict[str, Any]:
    """What came of all rounds, behind `head`; each is shown when it is over. Raises CommandError where none can be."""
    from deploy.chaos.report import figures, round_line
    from deploy.chaos.run import ChaosRun

    results: list[RoundResult] = []

    def found() -> dict[str, Any]:
        return head | figures(results, run.cases, run.skipped, run.usage, run.broken, run.grown)

    def show(strike: Strike, result: RoundResult) -> None:
        results.append(result)
        report.show(round_line(strike.number, result))
        report.keep(found())  # an hour's results outlive an accident

    async with stack.running():
        run = ChaosRun(stack, chosen, options)
        if not run.cases:
            raise CommandError("none of these faults can be done here: " + "; ".join(run.skipped.values()))
        results[:] = await run.run(show)
    return found()


def _needs_outside_namespaces(needs: frozenset[Need]) -> frozenset[Need]:
    """Runs the command again in namespaces where these are needed and permitted, and does not return then; otherwise
    returns what can be had without them."""
    from deploy.chaos.namespaces import namespaces_command, run_again

    if "namespaces" not in needs:
        return needs
    if (way := namespaces_command()) is not None:
        run_again(way, [*sys.argv[1:], "--in-namespaces"])
    return needs - {"namespaces", "disk"}


def _typed_command() -> str:
    return shlex.join(["baton", *(each for each in sys.argv[1:] if each != "--in-namespaces")])


def _up_options(values: dict[str, Any]) -> list[str]:
    """`values`, as `given` has them, as `baton up` is typed."""
    found = []
    for name, value in values.items():
        flag = offers()[name].flag
        found.append(flag if value is True else f"{flag}={value}")
    return found


with_options(chaos, (offers()[option] for option in STACK_OPTIONS), STACK)
