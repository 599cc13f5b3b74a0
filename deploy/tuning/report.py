"""What a study found: a table of its trials, the best one's configuration file, and a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.supervisor.launch import EVERY_SERVICE
from deploy.tuning.space import SearchSpace, Settings
from deploy.tuning.trials import FinishedTrial
from services.bench.report import INCHES, Table, blank_figure, save


def trial_table(trials: Sequence[FinishedTrial], names: Sequence[str]) -> Table:
    """A row for each trial. `names`: of the settings."""
    heads = (*names, "good req/s", "SLO %", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "failure")
    return Table(heads, [trial_row(each, names) for each in trials], names=len(names))


def trial_row(trial: FinishedTrial, names: Sequence[str]) -> tuple[str, ...]:
    """The cells of one of its rows."""
    settings = tuple(trial.settings[name] for name in names)
    if trial.figures is None:
        return (*settings, *["-"] * 6, trial.failure or "")
    figures = trial.figures
    total = figures["completed"] + figures["failed"]
    share = 100 * trial.goodput * figures["duration"] / total if total else 0.0
    times = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
    return (*settings, f"{trial.goodput:.2f}", f"{share:.1f}", *(f"{figures[each]:.1f}" for each in times), "")


def best_first(trials: Sequence[FinishedTrial]) -> list[FinishedTrial]:
    """By goodput, then by the time of a request."""
    return sorted(trials, key=lambda each: (-each.goodput, each.seconds))


def configuration_file(command: str, services: Mapping[str, Mapping[str, object]]) -> str:
    """A file for `baton up --config`. `services`: service → setting → value; `command`: what to type with it."""
    lines = [f"# {command}"]
    for service, settings in sorted(services.items()):  # those of all services are first, as TOML has it
        heading = [] if service == EVERY_SERVICE else [f"[{service}]"]
        lines += ["", *heading, *(f"{name} = {json.dumps(value)}" for name, value in sorted(settings.items()))]
    return "\n".join(lines) + "\n"


def markdown(trials: Sequence[FinishedTrial], names: Sequence[str], command: str, chosen: str) -> str:
    """The report's page: the command, what it chose, and all trials, the best first."""
    table = "\n".join(trial_table(best_first(trials), names).lines())
    return f"# Trials\n\n    {command}\n\n{chosen}\n\n{table}\n"


def plot(trials: Sequence[FinishedTrial], best: FinishedTrial | None, space: SearchSpace, file: Path) -> None:
    """Goodput by trial, with the best so far, and by each setting's value. Raises BenchError where it cannot be drawn
    or written."""
    names = [name for name, values in space.values.items() if len(values) > 1]
    figure = blank_figure(len(names) + 1, INCHES)
    over_time, *by_setting = figure.subplots(1, len(names) + 1, sharey=True, squeeze=False)[0]
    numbers, goodputs = [each.number for each in trials], [max(0.0, each.goodput) for each in trials]
    over_time.plot(numbers, goodputs, "o", label="trial")
    over_time.plot(numbers, [max(goodputs[: count + 1]) for count in range(len(goodputs))], "-", label="best so far")
    over_time.set(xlabel="trial", ylabel="requests/s within the objectives")
    over_time.legend()
    for axis, name in zip(by_setting, names, strict=True):
        values = space.values[name]
        axis.plot([values.index(each.settings[name]) for each in trials], goodputs, "o")
        if best is not None:
            axis.plot([values.index(best.settings[name])], [best.goodput], "*", markersize=14)
        axis.set_xticks(range(len(values)), values)
        axis.set(xlabel=name)
    save(figure, file)


def shown_settings(settings: Settings) -> str:
    """In one line."""
    return ", ".join(f"{name} {value}" for name, value in settings.items())
