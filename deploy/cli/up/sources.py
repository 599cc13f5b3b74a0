"""Options that `baton up` deals out to processes itself, such as the port, where `--set`, the environment or a TOML
file say them: each process is told them by its command line, which wins over its own reading of these (ADR 240)."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from msgspec import Struct

from deploy.cli.up.assignments import Settings
from deploy.cli.up.options import Offer, offers
from deploy.configuration import CONFIGS
from deploy.errors import CommandError
from deploy.supervisor.launch import EVERY_SERVICE, SECRETS
from shared.config import ENVIRONMENT_PREFIX, ConfigError, ServiceConfig, SettingValue, given_settings, near
from shared.settings import settings_of

OTHER_VARIABLES = frozenset(
    {
        "BATON_API_KEY",
        "BATON_BENCH_API_KEY",
        "BATON_BENCH_NATS_PASSWORD",
        "BATON_CLIENT_CERT",
        "BATON_CLIENT_KEY",
        "BATON_JOIN_TOKEN",
        "BATON_KUBERNETES_URL",
        "BATON_NAME",
        "BATON_PROCESS_NAME",
        "BATON_PROCESS_OF",
    }
)
"""Of other commands than `up`, of the benchmarks, and those by which processes are known."""


def with_sources(
    typed: Mapping[str, Any], assigned: Settings, config: Path | None, environment: Mapping[str, str]
) -> dict[str, Any]:
    """`typed`, with what the sources say of options that were not typed; `--set` wins over what was. Raises
    CommandError."""
    check_sources(config, environment, _overridden(typed, assigned))
    found = dict(typed)
    dealt_out = [(offer, *offer.targets[0]) for offer in offers().values() if offer.option.placed]
    said = {service: _of_service(service, config, environment) for service in {each for _, each, _ in dealt_out}}
    for offer, service, setting in dealt_out:
        by_hand = assigned.get(service, {}).get(setting.name)
        if by_hand is not None:
            found[offer.name] = _as_typed(offer, SettingValue(by_hand, "--set"))
        elif typed.get(offer.name) in (None, []) and setting.name in said[service]:
            found[offer.name] = _as_typed(offer, said[service][setting.name])
    return found


def check_sources(
    config: Path | None, environment: Mapping[str, str], overridden: Set[tuple[str, str]] = frozenset()
) -> None:
    """Raises CommandError for what any service would refuse as it starts: a setting that it has not, in its table of
    the file or in a variable with its name, or a value that is not allowed. `overridden`: services and their settings
    that have another value, so that nobody reads this one."""
    for service, kind in CONFIGS.items():
        known = settings_of(kind)
        for name, given in _of_service(service, config, environment).items():
            if not overridden.isdisjoint({(service, name), (EVERY_SERVICE, name)}):
                continue
            try:
                known[name].parse(given.value)
            except ValueError as error:
                raise _refusal(name, given, error) from None


def _overridden(typed: Mapping[str, Any], assigned: Settings) -> set[tuple[str, str]]:
    """The settings that were typed, as options or by `--set`, of the services that get them."""
    by_option = [offer for offer in offers().values() if typed.get(offer.name) not in (None, [])]
    return {(service, setting.name) for offer in by_option for service, setting in offer.targets} | {
        (service, name) for service, settings in assigned.items() for name in settings
    }


def unread_variables(environment: Mapping[str, str]) -> list[str]:
    """A line for each variable that begins as ours do and that nothing reads, with the nearest that something does."""
    unread = [name for name in sorted(environment) if name.startswith(ENVIRONMENT_PREFIX)]
    known = read_variables() if unread else frozenset()
    return [f"environment {name}: nothing reads it{near(name, known)}" for name in unread if name not in known]


def read_variables() -> frozenset[str]:
    """All variables of ours that `baton` and the services read."""
    names = {f"{ENVIRONMENT_PREFIX}{key}" for key in ("config", *settings_of(ServiceConfig))}
    names |= {f"{ENVIRONMENT_PREFIX}{service}_{key}" for service, kind in CONFIGS.items() for key in settings_of(kind)}
    named = {offer.option.environment for offer in offers().values() if offer.option.environment is not None}
    return OTHER_VARIABLES | named | {f"{name}{suffix}".upper() for name in names for suffix in ("", "_file")}


def _of_service(service: str, config: Path | None, environment: Mapping[str, str]) -> Mapping[str, SettingValue]:
    """What file and environment say of a service, or of all: EVERY_SERVICE is no name that either could have."""
    kind: type[Struct] = CONFIGS.get(service, ServiceConfig)
    try:
        return given_settings(service, kind, config, environment)
    except ConfigError as error:
        raise CommandError(str(error), status=2) from None


def _as_typed(offer: Offer, given: SettingValue) -> Any:
    """The value as the command line would have it; None for `none`."""
    setting = offer.setting
    try:
        parsed = setting.parse(given.value)
    except ValueError as error:
        raise _refusal(setting.name, given, error) from None
    if parsed is None or (setting.plain_type in (int, float) and not setting.is_bytes):
        return parsed
    if offer.repeated:
        return list(parsed)
    return ",".join(map(str, given.value)) if isinstance(given.value, list) else str(given.value)


def _refusal(name: str, given: SettingValue, error: ValueError) -> CommandError:
    shown = "***" if name in SECRETS else repr(given.value)
    return CommandError(f"{name} = {shown} (from {given.source}): {error}", status=2)
