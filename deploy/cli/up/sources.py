"""Options that `baton up` deals out to processes itself, such as the port, where `--set`, the environment or a TOML
file say them: each process is told them by its command line, which wins over its own reading of these (ADR 240)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from deploy.cli.up.assignments import Settings
from deploy.cli.up.options import Offer, offers
from deploy.configuration import CONFIGS
from deploy.errors import CommandError
from deploy.supervisor.launch import SECRETS
from shared.config import ConfigError, Given, ServiceConfig, given_settings


def with_sources(
    typed: Mapping[str, Any], assigned: Settings, config: Path | None, environment: Mapping[str, str]
) -> dict[str, Any]:
    """`typed`, with what the sources say of options that were not typed; `--set` wins over what was. Raises
    CommandError."""
    found = dict(typed)
    dealt_out = [(offer, *offer.targets[0]) for offer in offers().values() if offer.option.placed]
    said = {service: _of_service(service, config, environment) for service in {each for _, each, _ in dealt_out}}
    for offer, service, setting in dealt_out:
        by_hand = assigned.get(service, {}).get(setting.name)
        if by_hand is not None:
            found[offer.name] = _as_typed(offer, Given(by_hand, "--set"))
        elif typed.get(offer.name) in (None, []) and setting.name in said[service]:
            found[offer.name] = _as_typed(offer, said[service][setting.name])
    return found


def _of_service(service: str, config: Path | None, environment: Mapping[str, str]) -> Mapping[str, Given]:
    """What file and environment say of a service, or of all: EVERY_SERVICE is no name that either could have."""
    kind: type[Struct] = CONFIGS.get(service, ServiceConfig)
    try:
        return given_settings(service, kind, config, environment)
    except ConfigError as error:
        raise CommandError(str(error), status=2) from None


def _as_typed(offer: Offer, given: Given) -> Any:
    """The value as the command line would have it; None for `none`."""
    setting = offer.setting
    try:
        parsed = setting.parse(given.value)
    except ValueError as error:
        shown = "***" if setting.name in SECRETS else repr(given.value)
        raise CommandError(f"{setting.name} = {shown} (from {given.source}): {error}", status=2) from None
    if parsed is None or (setting.plain_type in (int, float) and not setting.is_bytes):
        return parsed
    if offer.repeated:
        return list(parsed)
    return ",".join(map(str, given.value)) if isinstance(given.value, list) else str(given.value)
