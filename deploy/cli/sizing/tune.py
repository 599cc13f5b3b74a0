"""`baton tune`: how it is typed, and its way from a question to trials, the best settings and their file."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.bench import with_stack_flags
from deploy.cli.running_stack import AsJson
from deploy.cli.sizing.simulate import (
    FLEET,
    FLEET_OPTIONS,
    OWN_OFFERS,
    PERCENTS,
    FleetConfig,
    load_of,
    objectives_of,
    setup_of,
    store_memory,
)
from deploy.cli.up.assignments import merged, parsed_settings
from deploy.cli.up.counts import check_order
from deploy.cli.up.options import STACK, given_apart, offers, service_settings, set_option, stack_settings, with_options
from deploy.configuration import CONFIGS
from deploy.errors import CommandError
from deploy.simulation.figures import figures
from deploy.simulation.kit import EnginePools
from deploy.simulation.simulation import simulate
from deploy.simulation.workloads import LOAD
from deploy.supervisor.background import stack_for_the_run
from deploy.tuning.report import configuration_file, markdown, plot, shown_settings, trial_row, trial_table
from deploy.tuning.space import (
    MIXED,
    PD_RATIO,
    PoolSizes,
    SearchSpace,
    Settings,
    SpaceError,
    default_space,
    parse_search,
    pools_at,
)
from deploy.tuning.trials import TrialFailed, best_of
from services.bench.errors import BenchError
from services.bench.report import OutputOptions, Report, check_plot
from services.bench.statistics import Metric
from shared.config import ServiceConfig, process_environment
from shared.settings import Setting, settings_of

if TYPE_CHECKING:
    from deploy.tuning.study import Study

SEARCH, REAL = "The search", "Real stacks instead of simulated ones"
FIXED = frozenset({"model", "engines"})
"""Options that no trial changes: the devices that `tp` leaves say how many engines there are."""
POOLS = frozenset({"engines", "prefill", "decode"})
"""Options that say how many engines there are: on the simulator `--gpus` and the ratio of pools do."""
LOAD_OFFERS = {name: offer for name, offer in OWN_OFFERS.items() if offer.option.panel == LOAD}
PLOT = "trials.png"
BENCH_SECONDS = 3600.0

TryOut = Callable[[Settings], Mapping[str, Any]]


def tune(
    out: Annotated[Path, typer.Option(help="Folder of the trials, the report and the best settings.")],
    goodput: Annotated[
        list[str], typer.Option(help="METRIC:MS, an objective; METRIC is ttft, tpot or e2el.", rich_help_panel=SEARCH)
    ],
    gpus: Annotated[
        int, typer.Option(min=1, help="Devices in all: engines = devices / tp.", rich_help_panel=SEARCH)
    ] = 1,
    search: Annotated[
        list[str] | None,
        typer.Option(
            help="SETTING=VALUE,VALUE: what to try of an option of baton up, or of SERVICE.KEY; pd_ratio=mixed,1:3,1:1 "
            "tries which share of the engines prefills, and which decodes.",
            metavar="SETTING",
            show_default="max_num_seqs, max_batch_tokens, and tp where there are several devices",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option(min=1, help="Trials in all, those of earlier runs included.", rich_help_panel=SEARCH)
    ] = 30,
    config: FleetConfig = None,
    settings: Annotated[
        list[str] | None,
        set_option("SERVICE.KEY=VALUE, the same in all trials.", FLEET),
    ] = None,
    up: Annotated[
        str | None, typer.Option(help="Arguments of baton up: each trial starts such a stack.", rich_help_panel=REAL)
    ] = None,
    bench: Annotated[
        str | None, typer.Option(help="The load of it: arguments of baton bench serve.", rich_help_panel=REAL)
    ] = None,
    as_json: AsJson = False,
    **typed: Any,
) -> None:
    """Find the settings that serve a load best: trials on the simulator, or on real stacks.

    Best is what answers most requests per second within the objectives. A second run in the same folder goes on where
    the first stopped.
    """
    objectives = objectives_of(goodput)
    own, values = given_apart(typed, LOAD_OFFERS)
    question: dict[str, Any] = {"gpus": gpus, "goodput": sorted(goodput), "set": sorted(settings or [])}
    question["config"] = None if config is None else _text_of(config)
    with tempfile.TemporaryDirectory(prefix="baton-tune-") as folder:
        try_out: TryOut
        if up is None:
            if bench is not None:
                raise CommandError("--bench: has no effect without --up", status=2)
            question |= {"load": load_of(own).description, "fleet": values}
            try_out = simulated_trials(own, values, settings or [], config, gpus, objectives, Path(folder))
        else:
            if wrong := sorted(own.keys() - {"seed"}) + list(values):
                raise CommandError(f"--{wrong[0].replace('_', '-')}: has no effect with --up; see --bench", status=2)
            question |= {"up": up, "bench": bench or ""}
            try_out = real_trials(_up_arguments(up, settings or [], config), bench or "", goodput, gpus)
        space = _space(search or [], gpus, simulated=up is None)
        question["space"] = space.values
        study = _study(out, space, question, trials, own.get("seed", 0))
        report = Report(OutputOptions(out / "result.json", as_json, False, False, None, _typed_command()))
        names = tuple(space.values)
        table = trial_table(study.finished(), names)
        report.show("\n".join(table.lines()))
        for trial in study.run(try_out):
            report.show(table.row(trial_row(trial, names)))
    tp: int | None = stack_settings(values).tp
    if up is not None and "tp" not in space.values:
        tp = _tp_of(_up_arguments(up, settings or [], config)) if PD_RATIO in space.values else None
    chosen = _result(out, study, space, report, partial(_up_command, up=up, gpus=gpus, tp=tp))
    report.show(f"\n{chosen}")


def simulated_trials(
    own: Mapping[str, Any],
    values: Mapping[str, Any],
    settings: list[str],
    config: Path | None,
    gpus: int,
    objectives: Mapping[Metric, float],
    folder: Path,
) -> TryOut:
    """Trials on the simulator: `own` are the load's options that were given, `values` the fleet's."""
    load = load_of(own)

    def try_out(tried: Settings) -> Mapping[str, Any]:
        options = {**values, **_options(tried)}
        assigned = [f"{name}={value}" for name, value in tried.items() if "." in name]
        try:
            setup = setup_of(options, [*settings, *assigned], "", config, folder)
            pools = _pools(tried, gpus, setup.worker.world_size)
            check_order(options, prefill=pools.prefill, decode=pools.decode)
            store = store_memory({**options, "prefill": pools.prefill})
        except CommandError as error:
            raise TrialFailed(str(error)) from None
        setup = setup._replace(pools=EnginePools(*pools), store_memory=store)
        result = simulate(setup.make_kit, setup.routing, load, engines=sum(pools))
        found = figures(result, PERCENTS, objectives, setup.worker.world_size)
        del found["by_engine"]
        return found

    return try_out


def real_trials(up: Sequence[str], bench: str, goodput: Sequence[str], gpus: int) -> TryOut:
    """Trials on stacks that are started for each one. `up`: arguments of `baton up`; `bench`: of `bench serve`."""
    objectives = [f"--goodput={each}" for each in goodput]

    def try_out(tried: Settings) -> Mapping[str, Any]:
        flags = [f"--set={name}={value}" for name, value in tried.items() if "." in name]
        flags += [f"{offers()[name].flag}={value}" for name, value in tried.items() if _is_option(name)]
        if "tp" in tried or PD_RATIO in tried:
            flags += _pools(tried, gpus, int(tried.get("tp") or _tp_of(up))).flags
        try:
            with stack_for_the_run([*up, *flags]) as state:
                argv = with_stack_flags(["serve", *shlex.split(bench), *objectives, "--json", "--no-progress"], state)
                done = subprocess.run(
                    [sys.executable, "-m", "services.bench", *argv],
                    capture_output=True,
                    text=True,
                    timeout=BENCH_SECONDS,
                    check=False,
                    env=process_environment(),
                )
        except (CommandError, subprocess.TimeoutExpired) as error:
            raise TrialFailed(" ".join(str(error).split())[-300:]) from None
        if done.returncode:
            raise TrialFailed(" ".join(done.stderr.split())[-300:])
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return try_out


def _text_of(config: Path) -> str:
    """Raises CommandError."""
    try:
        return config.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--config {config}: {error}", status=2) from None


def _up_arguments(up: str, settings: Sequence[str], config: Path | None) -> list[str]:
    configs = [] if config is None else [f"--config={config}"]
    return [*shlex.split(up), *configs, *(f"--set={each}" for each in settings)]


def _pools(tried: Settings, gpus: int, tp: int) -> PoolSizes:
    """The engines of so many devices. Raises TrialFailed."""
    if gpus < tp:
        raise TrialFailed(f"tp {tp}: needs {tp} devices, --gpus says {gpus}")
    try:
        return pools_at(tried.get(PD_RATIO, MIXED), gpus // tp)
    except SpaceError as error:
        raise TrialFailed(str(error)) from None


def _tp_of(up: Sequence[str]) -> int:
    """What the arguments of `baton up` say, or its default. One that is none, it refuses itself."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(offers()["tp"].flag, dest="tp", default="1")
    text: str = parser.parse_known_args(list(up))[0].tp
    return int(text) if text.isdecimal() else 1


def _is_option(name: str) -> bool:
    """Whether what is tried under this name is an option of `baton up`."""
    return "." not in name and name != PD_RATIO


def _options(tried: Settings) -> dict[str, Any]:
    return {name: _setting(name).parse(value) for name, value in tried.items() if _is_option(name)}


def _space(texts: Sequence[str], gpus: int, *, simulated: bool) -> SearchSpace:
    """Raises CommandError for a setting or a value that there is not."""
    try:
        values = parse_search(texts) or default_space(gpus)
        for name, each in values.items():
            if name == PD_RATIO:
                for value in each:
                    pools_at(value, max(2, gpus))
                continue
            if simulated and name in POOLS:
                raise SpaceError(f"{name}: on the simulator {PD_RATIO} says how many engines prefill and decode")
            if name in FIXED or (simulated and "." not in name and name not in FLEET_OPTIONS):
                raise SpaceError(f"{name}: no trial on the simulator changes it" if simulated else f"{name}: is fixed")
            for value in each:
                try:
                    _setting(name).parse(value)
                except ValueError as error:
                    raise SpaceError(f"{name}={value}: {error}") from None
        return SearchSpace(values)
    except SpaceError as error:
        raise CommandError(f"--search {error}", status=2) from None


def _setting(name: str) -> Setting:
    """Raises SpaceError."""
    service, dot, key = name.partition(".")
    if dot:
        found = settings_of(CONFIGS[service]).get(key) if service in CONFIGS else None
    else:
        offer = offers().get(name)
        found = None if offer is None else offer.setting
    if found is None:
        raise SpaceError(f"{name}: is no option of baton up and no setting of a service")
    return found


def _study(out: Path, space: SearchSpace, question: Mapping[str, Any], trials: int, seed: int) -> Study:
    """Raises CommandError, also where the libraries are not installed."""
    try:
        from deploy.tuning.study import Study, StudyMismatch

        check_plot(out / PLOT)
    except (ImportError, BenchError):
        raise CommandError("baton tune needs Optuna and matplotlib: pip install 'baton-serve[tune]'") from None
    try:
        return Study(out / "trials.jsonl", space, question, trials=trials, seed=seed)
    except StudyMismatch as error:
        raise CommandError(f"--out {error}", status=2) from None
    except OSError as error:
        raise CommandError(f"--out {out}: {error.strerror}") from None


def _result(
    out: Path, study: Study, space: SearchSpace, report: Report, command_of: Callable[[Settings, Path], str]
) -> str:
    """Writes what was found to the folder. Returns the choice in words. Raises CommandError."""
    trials, names = study.finished(), tuple(space.values)
    best = best_of(trials)
    if best is None:
        chosen = "No settings met the objectives."
    else:
        command = command_of(best.settings, out / "best.toml")
        assigned = [f"{name}={value}" for name, value in best.settings.items() if "." in name]
        services = merged(service_settings(_options(best.settings)), parsed_settings(assigned))
        parsed = {
            service: {
                name: settings_of(CONFIGS.get(service, ServiceConfig))[name].parse(value)
                for name, value in each.items()
            }
            for service, each in services.items()
        }
        (out / "best.toml").write_text(configuration_file(command, parsed), encoding="utf-8")
        chosen = (
            f"Best: {shown_settings(best.settings)}, {best.goodput:.2f} requests/s within the objectives.\n{command}"
        )
    (out / "report.md").write_text(markdown(trials, names, _typed_command(), chosen), encoding="utf-8")
    try:
        plot(trials, best, space, out / PLOT)
    except BenchError as error:
        raise CommandError(str(error)) from None
    report.end({"best": best and best.settings, "trials": [each._asdict() for each in trials]})
    return chosen


def _up_command(settings: Settings, file: Path, *, up: str | None, gpus: int, tp: int | None) -> str:
    """What to type for a stack with these settings: those of services come from `file`. `tp`: of every trial, unless
    that is one of the settings; None: `up` says how many engines there are."""
    options = {name: value for name, value in settings.items() if any(owner == STACK for owner, _ in _targets(name))}
    flags = [f"{offers()[name].flag} {value}" for name, value in options.items()]
    if tp is not None:
        pools = pools_at(settings.get(PD_RATIO, MIXED), gpus // int(settings.get("tp", tp)))
        flags += [flag.replace("=", " ") for flag in pools.flags]
    return " ".join(["baton up", *([up] if up else []), *flags, f"--config {file}"])


def _targets(name: str) -> tuple[tuple[str, Setting], ...]:
    return offers()[name].targets if name in offers() else ()


def _typed_command() -> str:
    return shlex.join(["baton", *sys.argv[1:]])


with_options(tune, LOAD_OFFERS.values())
with_options(tune, (offers()[option] for option in FLEET_OPTIONS if option not in POOLS), FLEET)
