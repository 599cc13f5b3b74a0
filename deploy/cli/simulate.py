"""`baton simulate`: how it is typed, and its way from settings to the report."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from deploy.cli.running_stack import AsJson
from deploy.cli.up.choices import merged, parsed_settings
from deploy.cli.up.options import given, offers, service_settings, stack_settings, with_options
from deploy.errors import CommandError

if TYPE_CHECKING:
    from deploy.simulation.fleet import ScalingLimits
    from deploy.simulation.front import Workload
    from deploy.simulation.setup import SimulationSetup
    from services.bench.statistics import Metric

FLEET, LOAD, SCALE, RESULT = "The fleet", "The load", "Engines that come and go", "The result"
FLEET_OPTIONS = (
    "model",
    "engines",
    "tp",
    "max_model_len",
    "kv_memory",
    "max_num_seqs",
    "max_batch_tokens",
    "router_policy",
)
"""Options of `baton up` that also say what is simulated; every other setting is given by --set."""
SHAPE = "llama-3.1-8b"
"""The model that is simulated by default: the demo model's steps would all take the same time."""
ENGINES = 4
SERVICES = frozenset({"worker", "scheduler", "coordinator"})
"""Those that are simulated, and so may be set."""

Arrivals = Literal["steady", "bursty", "diurnal"]
TraceFormat = Literal["auto", "mooncake", "azure"]
Scaling = Literal["static", "queue-length"]
CONCURRENT_PROMPTS, SECONDS = 1000, 300.0


def simulate(
    arrivals: Annotated[
        Arrivals,
        typer.Option(help="When requests come: at random, in bursts, or in daily waves.", rich_help_panel=LOAD),
    ] = "steady",
    request_rate: Annotated[float, typer.Option(min=0.001, help="Requests/s, the mean.", rich_help_panel=LOAD)] = 4.0,
    duration: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds of traffic (300), or of a trace (all).", rich_help_panel=LOAD),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Constant number of open requests instead of a rate; output lengths are normal, 20 to 500.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Requests of --concurrency (1000), or of a trace (all).", rich_help_panel=LOAD),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="File of requests in Mooncake's or Azure's format, in place of those.", rich_help_panel=LOAD),
    ] = None,
    trace_format: Annotated[
        TraceFormat, typer.Option(help="The format, where it does not show.", rich_help_panel=LOAD)
    ] = "auto",
    trace_scale: Annotated[
        float,
        typer.Option(min=0.0001, help="Factor on a trace's times: 0.5 is twice the rate.", rich_help_panel=LOAD),
    ] = 1.0,
    input_len: Annotated[
        int, typer.Option(min=1, help="Prompt tokens behind a shared prefix.", rich_help_panel=LOAD)
    ] = 1024,
    output_len: Annotated[int, typer.Option(min=1, help="Output tokens.", rich_help_panel=LOAD)] = 256,
    range_ratio: Annotated[
        float, typer.Option(min=0, max=0.99, help="How far lengths vary, uniformly.", rich_help_panel=LOAD)
    ] = 0.5,
    num_prefixes: Annotated[int, typer.Option(min=0, help="Beginnings that prompts share.", rich_help_panel=LOAD)] = 0,
    prefix_len: Annotated[int, typer.Option(min=1, help="Tokens of each.", rich_help_panel=LOAD)] = 1024,
    prefix_popularity: Annotated[
        float, typer.Option(min=0, help="Exponent of Zipf's law over them; 0: all alike.", rich_help_panel=LOAD)
    ] = 1.0,
    burstiness: Annotated[
        float, typer.Option(min=0.001, help="Of bursty arrivals: 1 is Poisson, less is burstier.", rich_help_panel=LOAD)
    ] = 0.25,
    period: Annotated[
        float, typer.Option(min=1, help="Of diurnal arrivals: seconds of a wave.", rich_help_panel=LOAD)
    ] = 3600.0,
    swing: Annotated[
        float,
        typer.Option(min=0, max=1, help="Of diurnal arrivals: share by which the rate varies.", rich_help_panel=LOAD),
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="The same seed is the same load.", rich_help_panel=LOAD)] = 0,
    hops: Annotated[
        str,
        typer.Option(
            help="Milliseconds of messages: request=2,place=0.5,plan=0.3,result=0.3,tokens=1,report=0.5.",
            rich_help_panel=FLEET,
            show_default=False,
        ),
    ] = "",
    config: Annotated[
        Path | None, typer.Option(help="TOML file with settings, such as a calibration.", rich_help_panel=FLEET)
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="SERVICE.KEY=VALUE, any setting of worker, scheduler or coordinator.",
            metavar="SETTING",
            rich_help_panel=FLEET,
        ),
    ] = None,
    scaling: Annotated[
        Scaling,
        typer.Option(
            help="static: always --engines. queue-length: as many as have --target-requests each.",
            rich_help_panel=SCALE,
        ),
    ] = "static",
    target_requests: Annotated[
        float, typer.Option(min=0.1, help="Requests per engine, waiting or running.", rich_help_panel=SCALE)
    ] = 16.0,
    min_engines: Annotated[int, typer.Option(min=1, help="Fewest engines.", rich_help_panel=SCALE)] = 1,
    max_engines: Annotated[int, typer.Option(min=1, help="Most engines.", rich_help_panel=SCALE)] = 64,
    scale_interval: Annotated[
        float, typer.Option(min=0.5, help="Seconds between decisions.", rich_help_panel=SCALE)
    ] = 15.0,
    scale_down_s: Annotated[
        float, typer.Option(min=0, help="Seconds for which fewer must be enough.", rich_help_panel=SCALE)
    ] = 300.0,
    start_s: Annotated[
        float,
        typer.Option(min=0, help="Seconds from an engine's start until it takes requests.", rich_help_panel=SCALE),
    ] = 30.0,
    compare: Annotated[
        str | None,
        typer.Option(help="Router policies or scalings, comma-separated: one run each.", rich_help_panel=RESULT),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="METRIC:MS, an objective; METRIC is ttft, tpot or e2el.", rich_help_panel=RESULT),
    ] = None,
    by_engine: Annotated[
        bool, typer.Option("--by-engine", help="A row for each engine.", rich_help_panel=RESULT)
    ] = False,
    processes: Annotated[
        int, typer.Option(min=0, help="Processes that share the engines; 0: one for all.", rich_help_panel=RESULT)
    ] = 0,
    output_json: Annotated[
        Path | None, typer.Option(help="Write the result here, as JSON.", rich_help_panel=RESULT)
    ] = None,
    label: Annotated[str | None, typer.Option(help="Kept in the result.", rich_help_panel=RESULT)] = None,
    as_json: AsJson = False,
    **typed: Any,
) -> None:
    """Simulate a fleet under load: the real coordinator and schedulers on a virtual clock, with simulated devices.

    Nothing is started, and no GPU is needed; the same command gives the same figures.
    """
    from deploy.simulation.figures import comparison, figures, text
    from deploy.simulation.fleet import QueueLengthScaling
    from deploy.simulation.simulation import simulate as run
    from deploy.simulation.traces import TraceError, TraceLoad
    from deploy.simulation.workloads import ConcurrentLoad, GeneratedLoad
    from services.bench.report import OutputOptions, Report

    if trace is not None and concurrency is not None:
        raise CommandError("--trace and --concurrency: one load is expected", status=2)
    objectives = _objectives(goodput or [])
    values = given(typed)
    load: Workload
    if trace is not None:
        load = TraceLoad(path=trace, format=trace_format, time_scale=trace_scale, count=num_prompts, seconds=duration)
    elif concurrency is not None:
        load = ConcurrentLoad(
            concurrency=concurrency,
            count=num_prompts or CONCURRENT_PROMPTS,
            input_len=input_len,
            range_ratio=range_ratio,
            seed=seed,
        )
    else:
        load = GeneratedLoad(
            rate=request_rate,
            seconds=duration or SECONDS,
            arrivals=arrivals,
            burstiness=burstiness,
            period=period,
            swing=swing,
            input_len=input_len,
            output_len=output_len,
            range_ratio=range_ratio,
            prefixes=num_prefixes,
            prefix_len=prefix_len,
            popularity=prefix_popularity,
            seed=seed,
        )
    engines = ENGINES if (chosen := stack_settings(values).engines) is None else chosen
    if engines < 1:
        raise CommandError(f"--engines {engines}: at least 1 is needed", status=2)
    output = OutputOptions(output_json, as_json, False, False, label, shlex.join(["baton", *sys.argv[1:]]))
    report, found = Report(output), {}
    with tempfile.TemporaryDirectory(prefix="baton-simulate-") as folder:
        setup = _setup(values, settings or [], hops, config, Path(folder))
        limits = _limits(min_engines, max_engines, scale_interval, start_s, scale_down_s)
        for name, (each, kind) in _runs(setup, scaling, compare).items():
            policy = QueueLengthScaling(target_requests, limits) if kind == "queue-length" else None
            try:
                result = run(
                    each.make_kit,
                    each.routing,
                    load,
                    engines=engines,
                    processes=processes,
                    policy=policy,
                    start_seconds=start_s,
                )
            except TraceError as error:
                raise CommandError(f"--trace {error}") from None
            found[name] = {
                **each.description,
                "scaling": kind,
                **load.description,
                "goodput_objectives_ms": {metric: limit * 1000 for metric, limit in objectives.items()},
                **figures(result, PERCENTS, objectives, each.worker.world_size),
            }
            if compare is None:
                report.end(found[name], text(found[name], PERCENTS, by_engine=by_engine))
    if compare is not None:
        report.end({"runs": found}, comparison(found))


PERCENTS = (90.0, 99.0)


def _setup(
    values: Mapping[str, Any], assignments: list[str], hops: str, config: Path | None, folder: Path
) -> SimulationSetup:
    """Raises CommandError."""
    from deploy.model_choice import model_folder
    from deploy.simulation.hops import parse_hops
    from deploy.simulation.setup import simulation_setup
    from services.worker.backend import BackendError
    from shared.config import ConfigError

    model = model_folder(values.get("model") or SHAPE, "dummy", folder)
    settings = merged(service_settings(values), parsed_settings(assignments))
    if unknown := sorted(set(settings) - SERVICES):
        raise CommandError(f"--set {unknown[0]}.…: only {', '.join(sorted(SERVICES))} are simulated", status=2)
    try:
        setup = simulation_setup(model, stack_settings(values).tp, settings, parse_hops(hops), config)
        setup.make_kit()
    except (ConfigError, BackendError) as error:
        raise CommandError(str(error), status=2) from None
    except ValueError as error:
        raise CommandError(f"--hops: {error}", status=2) from None
    return setup


def _runs(setup: SimulationSetup, scaling: Scaling, compare: str | None) -> dict[str, tuple[SimulationSetup, Scaling]]:
    """What is to be simulated, by name. Raises CommandError."""
    from services.coordinator.config import Policy

    if compare is None:
        return {scaling: (setup, scaling)}
    runs: dict[str, tuple[SimulationSetup, Scaling]] = {}
    for name in filter(None, (each.strip() for each in compare.split(","))):
        kind = next((each for each in get_args(Scaling) if each == name), None)
        policy = next((each for each in get_args(Policy) if each == name), None)
        if kind is None and policy is None:
            known = ", ".join((*get_args(Policy), *get_args(Scaling)))
            raise CommandError(f"--compare {name}: one of {known} is expected", status=2)
        runs[name] = (setup if policy is None else setup.routed(policy), scaling if kind is None else kind)
    return runs


def _limits(minimum: int, maximum: int, interval: float, start: float, down: float) -> ScalingLimits:
    """Raises CommandError."""
    from deploy.simulation.fleet import ScalingLimits

    if maximum < minimum:
        raise CommandError(f"--max-engines {maximum}: must not be below --min-engines, which is {minimum}", status=2)
    return ScalingLimits(minimum=minimum, maximum=maximum, interval=interval, start_seconds=start, stabilization=down)


def _objectives(pairs: list[str]) -> dict[Metric, float]:
    """Seconds by metric. Raises CommandError."""
    from services.bench.statistics import parse_goodput

    try:
        return parse_goodput(pairs)
    except ValueError as error:
        raise CommandError(f"--goodput: {error}", status=2) from None


with_options(simulate, (offers()[option] for option in FLEET_OPTIONS), FLEET)
