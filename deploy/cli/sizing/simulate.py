"""`baton simulate`: how it is typed, and its way from settings to the report."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import typer

from deploy.cli.running_stack import AsJson
from deploy.cli.up.assignments import merged, parsed_settings
from deploy.cli.up.counts import check_order, mixed_engines
from deploy.cli.up.options import (
    given_apart,
    offers,
    offers_of,
    service_settings,
    set_option,
    stack_settings,
    with_options,
)
from deploy.errors import CommandError
from deploy.model_choice import model_folder
from deploy.simulation.figures import comparison, figures, text
from deploy.simulation.fleet import SCALING, QueueLengthScaling, ScalingLimits, ScalingPolicy
from deploy.simulation.front import Workload
from deploy.simulation.hops import parse_hops
from deploy.simulation.kit import EnginePools, SlowEngines
from deploy.simulation.planner_policy import PlannerScaling, planner_scaling
from deploy.simulation.setup import SimulationSetup, simulation_setup
from deploy.simulation.simulation import simulate as run
from deploy.simulation.traces import TraceError, TraceLoad
from deploy.simulation.workloads import ConcurrentLoad, GeneratedLoad
from deploy.supervisor.launch import EVERY_SERVICE
from services.bench.report import OutputOptions, Report
from services.bench.statistics import Metric, parse_goodput
from services.coordinator.config import Policy
from services.planner.core.predictors import PredictorName
from services.planner.core.sizing import LatencyTargets
from services.worker.backend import BackendError
from shared.config import ConfigError
from shared.settings import parse_bytes, settings_of

FLEET, RESULT = "The fleet", "The result"
FLEET_OPTIONS = (
    "model",
    "engines",
    "prefill",
    "decode",
    "tp",
    "kvstore_memory",
    "max_model_len",
    "kv_memory",
    "max_num_seqs",
    "max_batch_tokens",
    "block_size",
    "itl_target_ms",
    "long_prefill_token_threshold",
    "router_policy",
    "pd_order",
    "prefill_queue",
)
"""Options of `baton up` that also say what is simulated; every other setting is given by --set."""
SHAPE = "llama-3.1-8b"
"""The model that is simulated by default: the demo model's steps would all take the same time."""
ENGINES = 4
POOLS_STORE = 64 * 2**30
"""Bytes of the KV store that pools hand over by, where --kvstore-memory does not say."""
SERVICES = frozenset({"worker", "scheduler", "coordinator"})
"""Those that are simulated, and so may be set."""
PERCENTS = (90.0, 99.0)
MIN_SPEED = 0.01
"""Of slow engines, beside the others."""

Scaling = Literal["static", "queue-length", "planner", "planner-seasonal", "planner-arima"]
PREDICTORS: dict[Scaling, PredictorName] = {
    "planner": "constant",
    "planner-seasonal": "seasonal",
    "planner-arima": "arima",
}
LIMITS, GENERATED = "limits", "request_rate"
LOADS: dict[str, type[GeneratedLoad | ConcurrentLoad | TraceLoad]] = {
    GENERATED: GeneratedLoad,
    "concurrency": ConcurrentLoad,
    "trace": TraceLoad,
}
"""By the option that asks for it; the first where none does."""
OWN_OFFERS = offers_of(
    (owner, setting)
    for owner, struct in {**LOADS, LIMITS: ScalingLimits}.items()
    for setting in settings_of(struct).values()
)

FleetConfig = Annotated[
    Path | None, typer.Option(help="TOML file with settings, such as a calibration.", rich_help_panel=FLEET)
]


def simulate(
    hops: Annotated[
        str,
        typer.Option(
            help="Milliseconds of messages: request=2,place=0.5,plan=0.3,result=0.3,tokens=1,store=0.2,report=0.5.",
            rich_help_panel=FLEET,
            show_default=False,
        ),
    ] = "",
    config: FleetConfig = None,
    slow_engines: Annotated[
        str,
        typer.Option(
            help="COUNT:SPEED, e.g. 2:0.5: the first 2 engines compute half as fast as the others.",
            rich_help_panel=FLEET,
            show_default=False,
        ),
    ] = "",
    settings: Annotated[
        list[str] | None,
        set_option("SERVICE.KEY=VALUE, any setting of worker, scheduler or coordinator.", FLEET),
    ] = None,
    scaling: Annotated[
        Scaling,
        typer.Option(
            help="static: always --engines. queue-length: as many as have --target-requests each. planner: as many as "
            "meet --goodput's ttft and tpot; the load is predicted to stay, by its season, or by ARIMA.",
            rich_help_panel=SCALING,
        ),
    ] = "static",
    target_requests: Annotated[
        float, typer.Option(min=0.1, help="Requests per engine, waiting or running.", rich_help_panel=SCALING)
    ] = 16.0,
    season: Annotated[
        float | None,
        typer.Option(
            "--season-s",
            min=1,
            help="Seconds after which the load repeats itself, for planner-seasonal; by default --period.",
            rich_help_panel=SCALING,
        ),
    ] = None,
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
    own, values = given_apart(typed, OWN_OFFERS)
    pools, memory = pools_of(values), store_memory(values)
    slow = slow_of(slow_engines, pools)
    if memory and processes:
        raise CommandError("--processes: engines that share a KV store are simulated together", status=2)
    study = _Study(load_of(own), _limits(own), objectives_of(goodput or []), target_requests, season, processes)
    report = Report(OutputOptions(output_json, as_json, False, False, label, shlex.join(["baton", *sys.argv[1:]])))
    try:
        with tempfile.TemporaryDirectory(prefix="baton-simulate-") as folder:
            setup = setup_of(values, settings or [], hops, config, Path(folder))
            setup = setup._replace(pools=pools, slow=slow, store_memory=memory)
            found = {name: study.figures_of(*each) for name, each in _runs(setup, scaling, compare).items()}
    except TraceError as error:
        raise CommandError(f"--trace {error}") from None
    if compare is None:
        report.end(found[scaling], text(found[scaling], PERCENTS, by_engine=by_engine))
    else:
        report.end({"runs": found}, comparison(found))


class _Study(NamedTuple):
    """What all runs of one command have in common: the load, and what it is judged and scaled by."""

    load: Workload
    limits: ScalingLimits
    objectives: dict[Metric, float]
    target_requests: float
    season: float | None
    processes: int

    def figures_of(self, setup: SimulationSetup, kind: Scaling) -> dict[str, Any]:
        """Runs it. Raises CommandError, TraceError."""
        result = run(
            setup.make_kit,
            setup.routing,
            self.load,
            engines=setup.pools.total,
            processes=self.processes,
            policy=self._policy(setup, kind),
            start_seconds=self.limits.start_seconds,
        )
        return {
            **setup.description,
            "scaling": kind,
            **self.load.description,
            "goodput_objectives_ms": {metric: limit * 1000 for metric, limit in self.objectives.items()},
            **figures(result, PERCENTS, self.objectives, setup.worker.world_size),
        }

    def _policy(self, setup: SimulationSetup, kind: Scaling) -> ScalingPolicy | None:
        if kind == "queue-length":
            return QueueLengthScaling(self.target_requests, self.limits)
        if (predictor := PREDICTORS.get(kind)) is None:
            return None
        load = self.load if isinstance(self.load, GeneratedLoad) else GeneratedLoad()
        return _planner(setup, self.objectives, self.limits, predictor, self.season or load.period)


def load_of(values: Mapping[str, Any]) -> Workload:
    """`values`: options that were given. Raises CommandError where they ask for two loads, or are not of the load that
    they ask for."""
    chosen = [owner for owner in LOADS if owner in values and owner != GENERATED]
    if len(chosen) > 1:
        raise CommandError("--trace and --concurrency: one load is expected", status=2)
    owner = chosen[0] if chosen else GENERATED
    for name in values:
        if owner not in (owners := dict(OWN_OFFERS[name].targets)) and LIMITS not in owners:
            raise CommandError(f"{OWN_OFFERS[name].flag}: has no effect with --{owner}", status=2)
    return LOADS[owner](**_fields(values, owner))


def pools_of(values: Mapping[str, Any]) -> EnginePools:
    """How many engines of each role. Raises CommandError."""
    stack = stack_settings(values)
    alone = not stack.prefill and not stack.decode
    engines = ENGINES if alone and stack.engines is None else stack.engines
    if alone and not engines:
        raise CommandError(f"--engines {engines}: at least 1 is needed", status=2)
    check_order(values, prefill=stack.prefill, decode=stack.decode)
    return EnginePools(mixed_engines(engines, stack.prefill, stack.decode), stack.prefill, stack.decode)


def slow_of(text: str, pools: EnginePools) -> SlowEngines:
    """Which engines are slow, and how much: none where nothing is said. Raises CommandError."""
    if not text:
        return SlowEngines()
    count, _, speed = text.partition(":")
    try:
        slow = SlowEngines(int(count), float(speed))
    except ValueError:
        slow = SlowEngines(-1)
    if not (0 <= slow.engines <= pools.total and MIN_SPEED <= slow.speed <= 1 / MIN_SPEED):
        expected = f"COUNT:SPEED is expected, 0 to {pools.total} engines and {MIN_SPEED:g} to {1 / MIN_SPEED:g}"
        raise CommandError(f"--slow-engines {text}: {expected}", status=2)
    return slow


def store_memory(values: Mapping[str, Any]) -> int:
    """Bytes of the engines' KV store; 0: none. Raises CommandError."""
    text = values.get("kvstore_memory")
    pools = bool(values.get("prefill"))
    if text is None:
        return POOLS_STORE if pools else 0
    try:
        memory = parse_bytes(text)
    except ValueError as error:
        raise CommandError(f"--kvstore-memory {text}: {error}", status=2) from None
    if pools and not memory:
        raise CommandError("--kvstore-memory 0: prefill engines hand over through a KV store", status=2)
    return memory


def _limits(values: Mapping[str, Any]) -> ScalingLimits:
    """Raises CommandError."""
    fields = _fields(values, LIMITS)
    try:
        return ScalingLimits(**fields)
    except ValueError as error:
        raise CommandError(f"--max-engines {fields.get('maximum', '')}: {error}", status=2) from None


def _planner(
    setup: SimulationSetup,
    objectives: Mapping[Metric, float],
    limits: ScalingLimits,
    predictor: PredictorName,
    season: float,
) -> PlannerScaling:
    """Raises CommandError."""
    if not {"ttft", "tpot"} & set(objectives):
        raise CommandError("--scaling planner: needs its targets: --goodput ttft:MS, --goodput tpot:MS", status=2)
    targets = LatencyTargets(ttft=objectives.get("ttft", inf), itl=objectives.get("tpot", inf))
    try:
        return planner_scaling(setup.make_kit(), setup.worker.world_size, targets, limits, predictor, season)
    except ValueError as error:
        raise CommandError(f"--season-s {season:g}: {error}", status=2) from None


def _fields(values: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The fields of one struct that options were given for."""
    offered = {name: dict(OWN_OFFERS[name].targets) for name in values}
    return {
        targets[owner].name: targets[owner].parse(values[name]) for name, targets in offered.items() if owner in targets
    }


def setup_of(
    values: Mapping[str, Any], assignments: list[str], hops: str, config: Path | None, folder: Path
) -> SimulationSetup:
    """Raises CommandError."""
    model = model_folder(values.get("model") or SHAPE, "dummy", folder)
    settings = merged(service_settings(values), parsed_settings(assignments))
    common = settings.pop(EVERY_SERVICE, {})
    if unknown := sorted(set(settings) - SERVICES):
        raise CommandError(f"--set {unknown[0]}.…: only {', '.join(sorted(SERVICES))} are simulated", status=2)
    settings = {service: {**common, **settings.get(service, {})} for service in SERVICES}
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


def objectives_of(pairs: list[str]) -> dict[Metric, float]:
    """Seconds by metric. Raises CommandError."""
    try:
        return parse_goodput(pairs)
    except ValueError as error:
        raise CommandError(f"--goodput: {error}", status=2) from None


with_options(simulate, OWN_OFFERS.values())
with_options(simulate, (offers()[option] for option in FLEET_OPTIONS), FLEET)
