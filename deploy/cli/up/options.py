"""Options that are settings, of `baton up` or of another command: made from the settings themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple

import typer
from msgspec import NODEFAULT, Struct

from deploy.configuration import CONFIGS
from deploy.errors import CommandError
from deploy.supervisor.launch import EVERY_SERVICE
from deploy.supervisor.settings import StackSettings
from shared.config import COMMON_KEYS, ServiceConfig
from shared.settings import Setting, UpOption, settings_of

PANELS = (
    "Model",
    "Capacity",
    "How many",
    "KV store",
    "Several hosts",
    "Federation",
    "Routing",
    "Overflow",
    "Bus",
    None,
    "Run",
)
"""In the order of `baton up --help`; None: those under no heading of their own."""
STACK = "stack"
"""The name in place of a service for settings of the stack itself."""


def set_option(help: str, panel: str | None = None) -> Any:
    """`--set` as a parameter of a command, to be read by `parsed_settings`."""
    return typer.Option("--set", help=help, metavar="SETTING", rich_help_panel=panel)


StackAssignments = Annotated[
    list[str] | None, set_option("SERVICE.KEY=VALUE sets any flag of a service; KEY=VALUE sets it for all services.")
]
DETACH = ("--detach", "-d")
Detach = Annotated[
    bool, typer.Option(*DETACH, help="Return when all is ready, and leave it running.", rich_help_panel="Run")
]


class Offer(NamedTuple):
    """One option, and the settings that it sets."""

    name: str
    option: UpOption
    setting: Setting
    """The one whose type and meaning the option has; other settings of the option get the same value."""
    targets: tuple[tuple[str, Setting], ...]
    """(service, setting); the service is EVERY_SERVICE or STACK for what is no service's own."""
    more: str | None = None
    """How more than one value is given, where a process has one of them; None: there is one."""

    @property
    def flag(self) -> str:
        """The option as it is typed, such as `--max-num-seqs`."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_on_by_default(self) -> bool:
        """Whether it is a switch that is on unless `--no-…` turns it off."""
        return self.setting.default is True

    @property
    def repeated(self) -> bool:
        """Whether the option is given once per value."""
        return self.more is not None or bool(self.setting.plain_type == tuple[str, ...])


@cache
def offers() -> Mapping[str, Offer]:
    """Every option by name, in the order in which help shows them."""
    found = offers_of(_offered())
    return {offer.name: offer for offer in sorted(found.values(), key=lambda each: PANELS.index(each.option.panel))}


def offers_of(settings: Iterable[tuple[str, Setting]]) -> dict[str, Offer]:
    """Their options by name, in order. `settings`: (what it is a setting of, setting); those without an option are
    left out."""
    found: dict[str, Offer] = {}
    for service, setting in settings:
        option = setting.up_option
        if option is None:
            continue
        name = option.name or setting.name
        before = found.get(name)
        targets = (*(before.targets if before else ()), (service, setting))
        found[name] = before._replace(targets=targets) if before else Offer(name, option, setting, targets)
    return found


def _offered() -> Iterable[tuple[str, Setting]]:
    sources: list[tuple[str, type[Struct]]] = [(STACK, StackSettings), *CONFIGS.items(), (EVERY_SERVICE, ServiceConfig)]
    for service, struct in sources:
        for setting in settings_of(struct).values():
            inherited = setting.name in COMMON_KEYS and service not in (STACK, EVERY_SERVICE)
            if not inherited:
                yield service, setting


def parameter(offer: Offer, panel: str | None) -> inspect.Parameter:
    """The option as a parameter for typer: keyword only, None unless given (a switch that is off by default: False)."""
    setting, plain = offer.setting, offer.setting.plain_type
    on = offer.is_on_by_default
    names = (f"{offer.flag}/--no-{offer.flag.removeprefix('--')}",) if on else (offer.flag,) if plain is bool else ()
    number = plain in (int, float) and not setting.is_bytes
    shown = offer.option.unset or setting.default_text
    info = typer.Option(
        *names,
        min=setting.limit("ge") if number else None,
        max=setting.limit("le") if number else None,
        help=setting.meaning if offer.more is None else f"{setting.meaning} {offer.more}",
        envvar=offer.option.environment,
        rich_help_panel=panel,
        show_default=shown if shown and plain is not bool else False,
    )
    text: Any = list[str] if offer.repeated else plain if number or setting.choices or plain is bool else str
    switch = plain is bool and not on
    annotation = Annotated[bool, info] if switch else Annotated[text | None, info]
    default = False if switch else None
    return inspect.Parameter(offer.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_options(command: Callable[..., None], offered: Iterable[Offer], panel: str | None = None) -> None:
    """Replaces the `**typed` of a command by these options. `panel` is one heading for all of them, in place of their
    own."""
    own = inspect.signature(command, eval_str=True)
    made = [parameter(offer, panel or offer.option.panel) for offer in offered]
    kept = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    positional = [each for each in kept if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    keyword = [each for each in kept if each.kind is inspect.Parameter.KEYWORD_ONLY]
    command.__signature__ = own.replace(parameters=[*positional, *made, *keyword])  # type: ignore[attr-defined]


def given(typed: Mapping[str, Any], known: Mapping[str, Offer] | None = None) -> dict[str, Any]:
    """The values that were typed, without options that were not given. `known`: all options by name, None for those of
    `baton up`. Raises CommandError for a value that is not allowed."""
    known = offers() if known is None else known
    values = {
        name: value
        for name, value in typed.items()
        if value is not None and value != [] and (value is not False or known[name].is_on_by_default)
    }
    for name, value in values.items():
        offer = known[name]
        for _, setting in offer.targets:
            try:
                setting.parse(value)
            except ValueError as error:
                raise CommandError(f"{offer.flag} {value!r}: {error}", status=2) from None
    return values


def given_apart(typed: Mapping[str, Any], own: Mapping[str, Offer]) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `given`, for a command that has options of its `own` beside those of `baton up`: both, apart."""
    apart = {name: value for name, value in typed.items() if name in own}
    return given(apart, own), given({name: value for name, value in typed.items() if name not in own})


def stack_settings(values: Mapping[str, Any]) -> StackSettings:
    """The settings of the stack itself. `values` are those of `given`."""
    own = settings_of(StackSettings)
    return StackSettings(**{name: own[name].parse(value) for name, value in values.items() if name in own})


def placed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options that the supervisor deals out: what was given, or the setting's default, None where there is none."""
    found = {}
    for offer in offers().values():
        if offer.option.placed:
            default = None if offer.option.unset or offer.setting.required else offer.setting.default
            found[offer.name] = values.get(offer.name, None if default is NODEFAULT else default)
    return found


def _as_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def service_settings(values: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Service → key → value, as flags of that service: all options that are passed on as they are."""
    found: dict[str, dict[str, str]] = {}
    for name, value in values.items():
        offer = offers()[name]
        for service, setting in offer.targets if not offer.option.placed else ():
            if service != STACK:
                found.setdefault(service, {})[setting.name] = _as_text(value)
    return found
