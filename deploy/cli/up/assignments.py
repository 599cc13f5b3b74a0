"""Settings of services by name, as `--set` assigns them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import get_args

from deploy.configuration import CONFIGS
from deploy.errors import CommandError
from deploy.supervisor.launch import EVERY_SERVICE
from shared.config import ServiceConfig
from shared.messages.lifecycle import Service
from shared.settings import Setting, settings_of

Settings = Mapping[str, Mapping[str, str]]


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
        name = key.replace("-", "_")
        known = settings_of(CONFIGS.get(service, ServiceConfig) if dot else ServiceConfig)
        if name not in known and (service in CONFIGS or not dot):
            meant = _near(service, name, known)
            raise CommandError(f"--set {assignment}: no such setting{meant}; docs/configuration.md has all", status=2)
        if name in known:
            value = _checked(known[name], value, assignment)
        settings[service if dot else EVERY_SERVICE][name] = value
    return dict(settings)


def _near(service: str, name: str, known: Iterable[str]) -> str:
    """What was probably meant, for a message. `service` is empty where the setting was to be that of all."""
    owner = next((each for each, config in CONFIGS.items() if not service and name in settings_of(config)), None)
    close = get_close_matches(name, known, 1)
    meant = f"{owner}.{name}" if owner else f"{service}.{close[0]}".removeprefix(".") if close else None
    return f", {meant} is near" if meant else ""


def _checked(setting: Setting, value: str, assignment: str) -> str:
    """`value`, as the service's command line takes it. Raises CommandError for one that the setting does not allow, so
    that it is named as it was given, before anything starts."""
    try:
        parsed = setting.parse(value)
    except ValueError as error:
        raise CommandError(f"--set {assignment}: {error}", status=2) from None
    return str(parsed).lower() if setting.plain_type is bool and parsed is not None else value


def merged(*layers: Settings) -> dict[str, dict[str, str]]:
    """The settings of all layers together; a later layer overrides earlier ones."""
    settings: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for layer in layers:
        for service, values in layer.items():
            settings[service].update(values)
    return dict(settings)


def check_journal(settings: Settings, engines: int) -> None:
    """Raises CommandError if several engines would write to one journal file, each moving away what another writes."""
    journal = settings.get("scheduler", {}).get("journal")
    if journal and engines > 1 and not Path(journal).is_dir():
        raise CommandError(
            f"--set scheduler.journal={journal}: {engines} engines need a folder that is there", status=2
        )
