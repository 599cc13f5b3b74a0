"""From what was typed to a `StackSpec`: the model's directory, each service's settings."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import deploy
from deploy.cli.errors import CommandError
from deploy.supervisor.core.plan import POOLS, Counts
from deploy.supervisor.launch import EVERY_SERVICE
from services.worker.binding import available_cores
from shared.ids import ModelName
from shared.messages.lifecycle import Service
from shared.model_files import ModelNotFound, resolve_model

DEMO_MODEL = Path(deploy.__file__).with_name("demo") / "model"
DEMO_NAME = "baton-demo"

Settings = Mapping[str, Mapping[str, str]]


def model_directory(model: str | None, *, weights: bool = True) -> Path:
    """Fetches from the hub where needed, without the weights if they are not. Raises CommandError."""
    if model is not None and not model.strip():
        raise CommandError("--model is empty; a directory or a Hugging Face id is expected", status=2)
    if model is None and not (DEMO_MODEL / "config.json").is_file():
        raise CommandError(f"the demo model is not in {DEMO_MODEL}; name a model with --model")
    try:
        return resolve_model(model or str(DEMO_MODEL), weights=weights)
    except ModelNotFound as error:
        raise CommandError(str(error)) from None


def served_name(model: str | None, asked: str | None) -> ModelName:
    """What clients call it: as asked, the hub's name, or the directory's."""
    if asked:
        return ModelName(asked)
    if model is None:
        return ModelName(DEMO_NAME)
    folder = Path(model).expanduser()
    return ModelName(folder.resolve().name if folder.is_dir() else model)


def parsed_settings(assignments: Sequence[str]) -> dict[str, dict[str, str]]:
    """`scheduler.run_ahead=0` for one service, `log_level=debug` for all. Raises CommandError."""
    settings: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for assignment in assignments:
        target, equals, value = assignment.partition("=")
        service, dot, key = target.rpartition(".")
        if not equals or not key.replace("_", "").replace("-", "").isalnum():
            raise CommandError(f"--set {assignment}: SERVICE.KEY=VALUE or KEY=VALUE is expected", status=2)
        if dot and service not in get_args(Service):
            raise CommandError(f"--set {assignment}: {service!r} is none of {', '.join(get_args(Service))}", status=2)
        settings[service if dot else EVERY_SERVICE][key.replace("-", "_")] = value
    return dict(settings)


def checked_namespace(namespace: str) -> str:
    """Raises CommandError where it could not be a token of a NATS subject."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", namespace):
        raise CommandError(f"--namespace {namespace!r}: A-Z a-z 0-9 _ - are allowed", status=2)
    return namespace


def check_journal(settings: Settings, engines: int) -> None:
    """Engines that write into one file would each move away what the others write. Raises CommandError."""
    journal = settings.get("scheduler", {}).get("journal")
    if journal and engines > 1 and not Path(journal).is_dir():
        raise CommandError(
            f"--set scheduler.journal={journal}: {engines} engines need a folder that is there", status=2
        )


def merged(*layers: Settings) -> dict[str, dict[str, str]]:
    """Later layers win."""
    settings: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for layer in layers:
        for service, values in layer.items():
            settings[service].update(values)
    return dict(settings)


def engines_asked(engines: int | None, prefill: int, decode: int) -> int:
    """Engines that do everything: one, but none beside pools, unless a number is given. Raises CommandError."""
    mixed = engines if engines is not None else int(not prefill and not decode)
    if mixed + decode == 0:
        raise CommandError("prefill engines need others that decode: --decode N or --engines N", status=2)
    return mixed


def layer_split(asked: str | None, counts: Counts) -> tuple[int, ...]:
    """`17,15`: layers of each pipeline stage. Raises CommandError."""
    if asked is None:
        return ()
    parts = asked.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise CommandError(f"--pp-layers {asked}: numbers from 1 on are expected, e.g. 17,15", status=2)
    stages = _stage_counts(counts)
    wrong = next((s for s in stages if s not in (1, len(parts))), None)
    if wrong is not None or len(parts) not in stages:
        raise CommandError(f"--pp-layers {asked}: {len(parts)} numbers for {wrong or 1} stages (--pp)", status=2)
    return tuple(map(int, parts))


def _stage_counts(counts: Counts) -> list[int]:
    return [counts.stages_of(pool) for pool in POOLS if counts.of(pool)]


def cpu_share(counts: Counts) -> int | None:
    """Threads for each rank where several engines share this machine; None: a rank knows its share of one engine."""
    if counts.all_engines == counts.hosts == 1:
        return None
    return max(1, available_cores() // counts.all_ranks)


def chosen(**settings: object) -> dict[str, str]:
    """Those that were given, as flag values."""
    return {key: _as_flag(value) for key, value in settings.items() if value is not None}


def _as_flag(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
