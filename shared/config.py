"""One frozen struct per service, filled from defaults < TOML file < environment < flags, and strict.

An unknown key or a bad value stops the start with key, value and source. The only module that reads the environment.

    class GatewayConfig(ServiceConfig, frozen=True, kw_only=True):
        port: Annotated[int, Meta(ge=0, le=65535, description="HTTP port.")] = 8000

    config = load_config("gateway", GatewayConfig, sys.argv[1:])
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, get_args

from msgspec import Meta, Struct

from shared.blocks import DEFAULT_BLOCK_SIZE, BlockSize
from shared.ids import InstanceId, ModelName, checked_instance
from shared.messages.lifecycle import HEARTBEAT_SECONDS, KEEP_ALIVE_SECONDS, MAX_KEEP_ALIVE_SECONDS, Service
from shared.settings import ContainerVariable, Port, UpOption, settings_of

if TYPE_CHECKING:
    from shared.bus.nats_connection import NatsOptions

ENVIRONMENT_PREFIX = "BATON_"

C = TypeVar("C", bound="ServiceConfig")


class ConfigError(Exception):
    """A start-up setting that cannot be used; the text names key, value and source."""


class ServiceConfig(Struct, frozen=True, kw_only=True):
    """The settings that every service has. They are also read from a TOML file's top level and from BATON_<KEY>."""

    instance: Annotated[str, Meta(description="Name of this process on the bus; unique.")] = ""
    nats_url: Annotated[
        tuple[str, ...],
        Meta(min_length=1, description="NATS servers, comma-separated; user:password@ is allowed."),
        UpOption("Bus", placed=True, unset="a server of its own", environment="BATON_NATS_URL"),
    ] = ("nats://127.0.0.1:4222",)
    nats_user: Annotated[str | None, Meta(description="User for NATS.")] = None
    nats_password: Annotated[
        str | None, Meta(description="Password for NATS; better set by environment than by flag.")
    ] = None
    nats_creds: Annotated[str | None, Meta(description="Credentials file for NATS (.creds).")] = None
    nats_ca: Annotated[str | None, Meta(description="CA file; switches TLS on.")] = None
    nats_connect_timeout: Annotated[float, Meta(gt=0, description="Seconds to wait for the first connection.")] = 10.0
    namespace: Annotated[
        str, Meta(pattern="^[A-Za-z0-9_-]+$", description="First token of every subject."), UpOption("Bus", placed=True)
    ] = "baton"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Lowest log level that is written."),
        UpOption("Run"),
        ContainerVariable(),
    ] = "info"
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(
            pattern="^https?://",
            description="URL of an OpenTelemetry collector's OTLP/HTTP receiver of traces, "
            "http://127.0.0.1:4318/v1/traces for instance; none: requests are not traced. Needs the extra `otel`.",
        ),
        UpOption("Run"),
        ContainerVariable(),
    ] = None
    trace_sample_rate: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of the requests that gateways begin a trace for; the `traceparent` of a client says it "
            "for its own request.",
        ),
        UpOption("Run"),
        ContainerVariable(),
    ] = 1.0
    trace_history: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="Spans of the last requests that a process remembers, for `baton trace` and the console, with "
            "or without a collector; 0: none.",
        ),
        UpOption("Run"),
        ContainerVariable(),
    ] = 2048
    metrics_host: Annotated[str, Meta(description="Address of the Prometheus endpoint.")] = "127.0.0.1"
    metrics_port: Annotated[
        Port | None, Meta(description="Port of the Prometheus endpoint; 0 picks one, none switches it off.")
    ] = 0
    heartbeat_interval_s: Annotated[
        float,
        Meta(
            ge=HEARTBEAT_SECONDS,
            le=MAX_KEEP_ALIVE_SECONDS,
            description="Seconds between two lifecycle messages while nothing changes. Above 1 a silent death takes "
            "twice as long to be noticed, and processes of releases before this one take its process for dead.",
        ),
    ] = KEEP_ALIVE_SECONDS
    block_size: Annotated[
        BlockSize,
        Meta(description="Tokens of a block of KV cache, by which prefixes are shared; one number for a stack."),
        UpOption("Capacity"),
        ContainerVariable(),
    ] = DEFAULT_BLOCK_SIZE
    lora_registry: Annotated[
        Path | None,
        Meta(
            description="JSON file of the LoRA adapters that operators load and unload at run time; gateways write it, "
            "workers follow it. None: adapters are those of `lora` alone."
        ),
        UpOption("Model"),
    ] = None
    drain_timeout: Annotated[
        float,
        Meta(ge=0, description="Seconds that open requests get to finish when the process stops."),
        UpOption("Run", placed=True),
    ] = 30.0
    supervisor_lock: Annotated[
        str | None, Meta(description="File that is locked for as long as a supervisor lives; none: there is none.")
    ] = None
    orphan_timeout: Annotated[
        float,
        Meta(ge=1, description="Seconds that a stack goes on without its supervisor before it drains and ends."),
        UpOption("Run", placed=True),
    ] = 300.0

    def nats_options(self) -> NatsOptions:
        """Where the bus is and who this process is there."""
        from shared.bus.nats_connection import NatsOptions  # not for those who have settings and no bus

        return NatsOptions(
            servers=self.nats_url,
            namespace=self.namespace,
            name=self.instance,
            user=self.nats_user,
            password=self.nats_password,
            credentials=Path(self.nats_creds) if self.nats_creds else None,
            tls_ca=Path(self.nats_ca) if self.nats_ca else None,
            connect_timeout=self.nats_connect_timeout,
        )

    def instance_id(self) -> InstanceId:
        """The process's name on the bus. Raises ValueError where it could not be part of a subject."""
        return checked_instance(self.instance)


class ModelServiceConfig(ServiceConfig, frozen=True, kw_only=True):
    """The settings of services that work for one model."""

    model: Annotated[
        str,
        Meta(min_length=1, description="Model directory, or a repository of the Hugging Face hub."),
        UpOption("Model", placed=True, unset="the demo model"),
    ]
    served_model_name: Annotated[
        str | None,
        Meta(description="Model name for clients; default: the model's own name."),
        UpOption("Model", placed=True),
        ContainerVariable("BATON_MODEL_NAME", "baton-demo"),
    ] = None

    def model_name(self) -> ModelName:
        """What clients call the model: the name that was given, or what the model itself was given as."""
        return ModelName(self.served_model_name or self.model)


COMMON_KEYS = frozenset(settings_of(ServiceConfig))
_SERVICES = frozenset(get_args(Service)) - {"supervisor"}  # which is `baton up`, and has options only
_FILE = "_file"
"""Behind a variable's name: the setting's value stands in the file that the variable names."""
_COMMON_VARIABLES = tuple(
    f"{ENVIRONMENT_PREFIX}{key}{suffix}".upper() for key in ("config", *sorted(COMMON_KEYS)) for suffix in ("", _FILE)
)
_MISSPELT = 0.9
"""How like a variable's name has to be to one that a service reads, to be taken for it misspelt."""


class SettingValue(NamedTuple):
    """What a source says of a setting."""

    value: Any
    source: str
    """For messages."""


def load_config(
    service: str,
    config_type: type[C],
    argv: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> C:
    """The service's configuration. Raises ConfigError; `--help` prints every flag and exits.

    `--config FILE` (or BATON_CONFIG) names a TOML file: common keys at its top level, others in table `[service]`. A
    variable with `_FILE` behind its name names a file that holds the value, for secrets.
    """
    environment = os.environ if environment is None else environment
    flags = _parse_flags(service, config_type, argv)
    settings = given_settings(service, config_type, flags.pop("config", None), environment)
    settings.update({key: SettingValue(value, f"--{key.replace('_', '-')}") for key, value in flags.items()})
    settings.setdefault("instance", SettingValue(_default_instance(service), "default"))
    return _build(config_type, settings)


def given_settings(
    service: str, config_type: type[Struct], config: str | Path | None, environment: Mapping[str, str]
) -> dict[str, SettingValue]:
    """What the file, or that of BATON_CONFIG, and the environment say of a service. Raises ConfigError."""
    file = config or environment.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    settings: dict[str, SettingValue] = _from_file(service, config_type, Path(file)) if file else {}
    settings.update(_from_environment(service, config_type, environment))
    return settings


def look_up_settings() -> None:
    """Finds what the settings of every service are whose configuration is imported, so that processes which are forked
    from now on have it in common: each would write to 400 pages to find out (ADR 214)."""
    found: list[type[Struct]] = [ServiceConfig]
    for struct in found:
        settings_of(struct)
        found += struct.__subclasses__()


def load_or_exit(service: str, config_type: type[C]) -> C:
    """`load_config` from the process's own arguments; a bad setting is printed and ends the process with status 2.
    Variables whose names are probably misspelt are printed, too."""
    try:
        config = load_config(service, config_type, sys.argv[1:])
    except ConfigError as error:
        print(f"{service}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    for line in misspelt_variables(service, config_type, os.environ):
        print(f"{service}: {line}", file=sys.stderr)
    return config


def misspelt_variables(service: str, config_type: type[Struct], environment: Mapping[str, str]) -> list[str]:
    """A line for each variable that no service reads and whose name is nearly one that this service does. Others that
    begin as ours may be of whatever started it: docker-compose.yml has `BATON_KV_SSD` for `BATON_KVSTORE_KV_SSD`."""
    services = tuple(f"{ENVIRONMENT_PREFIX}{each}_".upper() for each in (*_SERVICES, service))
    ours = [name for name in sorted(environment) if name.startswith(ENVIRONMENT_PREFIX)]
    keys = settings_of(config_type)
    strange = [
        name
        for name in ours
        if not name.startswith(services)
        and name not in _COMMON_VARIABLES
        and name.removeprefix(ENVIRONMENT_PREFIX).lower() not in keys
    ]
    if not strange:
        return []
    own = [f"{ENVIRONMENT_PREFIX}{service}_{key}".upper() for key in keys]
    known = [*_COMMON_VARIABLES, *own, *(name + _FILE.upper() for name in own)]
    meant = {name: get_close_matches(name, known, n=1, cutoff=_MISSPELT) for name in strange}
    return [f"environment {name}: nothing reads it, {like[0]} is near" for name, like in meant.items() if like]


def process_environment() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def home_folder() -> Path:
    """This user's. Raises OSError where there is none: a uid of a container need not have an entry in /etc/passwd."""
    try:
        return Path.home()
    except RuntimeError:
        raise FileNotFoundError(f"user {os.getuid()} has no home: set HOME") from None


def cache_folder(name: str) -> Path:
    """The folder of this name among those that this user's processes keep things in. Raises OSError where the user has
    no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else home_folder() / ".cache") / "baton" / name


def replace_environment(environment: Mapping[str, str]) -> None:
    """Gives this process another environment, of a program that runs in it from now on."""
    os.environ.clear()
    os.environ.update(environment)


def default_environment(defaults: Mapping[str, str], *, unless: str) -> None:
    """Sets variables of this process that are not set, for libraries that read them as they are loaded; none where
    `unless` is set, which says the same in other words."""
    if unless not in os.environ:
        for name, value in defaults.items():
            os.environ.setdefault(name, value)


def sleep_behind_operations() -> None:
    """Has PyTorch's threads (GNU OpenMP) wait as long as those of our own kernels do, some 60 µs
    (`services/worker/ops/native/waiting.h`), and then sleep: by their default they spin for several milliseconds behind
    every operation, on processors that others are to run on. An operator's own word stands. To be called before PyTorch
    is imported."""
    default_environment({"GOMP_SPINCOUNT": "3000"}, unless="OMP_WAIT_POLICY")


def inherited_environment(service: str | None = None) -> dict[str, str]:
    """What a process that the supervisor starts inherits of this process's environment: of our own variables only those
    that are settings of its service, so that no service gets another's secrets or the cluster's. None: no service."""
    read = () if service is None else (f"{ENVIRONMENT_PREFIX}{service.upper()}_", *_COMMON_VARIABLES)
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ENVIRONMENT_PREFIX) or name.startswith(read[:1]) or name in read
    }


def _default_instance(service: str) -> str:
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:32]
    return f"{service}-{host}-{os.getpid()}"


class _Flags(argparse.ArgumentParser):
    """Reports an error in one line; argparse's page of all flags would hide it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} ({self.prog} --help shows every flag)")


def _parse_flags(service: str, config_type: type[Struct], argv: Sequence[str]) -> dict[str, Any]:
    if (plain := _plain_flags(config_type, argv)) is not None:
        return plain
    package = config_type.__module__.rpartition(".")[0] or service
    parser = _Flags(prog=f"python -m {package}", argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings.")
    words = {word.partition("=")[0] for word in argv}
    for setting in settings_of(config_type).values():
        if words.isdisjoint((setting.flag, f"--no-{setting.flag[2:]}", "-h", "--help")):
            continue  # all of them take 4 ms, and 2 MiB that a forked process has in common with others until then
        default = f" (default: {setting.default_text})" if setting.default_text else ""
        described = (setting.description + default).replace("%", "%%")
        if setting.plain_type is bool:
            parser.add_argument(setting.flag, dest=setting.name, action=argparse.BooleanOptionalAction, help=described)
        else:
            parser.add_argument(setting.flag, dest=setting.name, metavar="VALUE", help=described)
    return vars(parser.parse_args(argv))


def _plain_flags(config_type: type[Struct], argv: Sequence[str]) -> dict[str, Any] | None:
    """Flags that are written as a supervisor writes them, `--flag=value`, or `--flag` and `--no-flag` of what is on or
    off; None where argparse is needed to read one or to say what is wrong. Without argparse a forked process keeps
    some 2 MiB in common with others (ADR 214)."""
    known = settings_of(config_type)
    flags: dict[str, Any] = {}
    for word in argv:
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        is_off = not equals and name.startswith("no_") and name not in known
        setting = known.get(name.removeprefix("no_") if is_off else name)
        if setting is None and name == "config" and equals:
            flags[name] = value
        elif (
            setting is None
            or flag != ("--no" + setting.flag[1:] if is_off else setting.flag)
            or (setting.plain_type is bool) is bool(equals)
        ):
            return None
        else:
            flags[setting.name] = value if equals else not is_off
    return flags


def _from_file(service: str, config_type: type[Struct], path: Path) -> dict[str, SettingValue]:
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    settings: dict[str, SettingValue] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            if key == service:
                settings.update({k: SettingValue(v, f"{path} [{service}]") for k, v in value.items()})
            elif key not in _SERVICES:
                raise ConfigError(f"[{key}] (from {path}): no such service; tables are {', '.join(sorted(_SERVICES))}")
        elif key in COMMON_KEYS:
            settings.setdefault(key, SettingValue(value, str(path)))
        else:
            raise ConfigError(
                f"{key} (from {path}): no setting of every service, which stand at the top"
                f"{near(key, COMMON_KEYS)}; those of one service stand in its table, such as [worker], and options of "
                "`baton up` alone, such as --engines, in no file"
            )
    _refuse_unknown(config_type, settings)
    return settings


def _from_environment(
    service: str, config_type: type[Struct], environment: Mapping[str, str]
) -> dict[str, SettingValue]:
    own, known = f"{ENVIRONMENT_PREFIX}{service.upper()}_", settings_of(config_type)
    settings: dict[str, SettingValue] = {}
    for name in sorted(environment, key=lambda name: (name.startswith(own), name)):  # a service's own variables win
        key, value = _key_of(name, own), environment[name]
        if key is None:
            continue
        if key in known or not key.endswith(_FILE):
            settings[key] = SettingValue(value, f"environment {name}")
        elif value:
            _refuse_twice(name, environment)
            settings[key.removesuffix(_FILE)] = _from_named_file(name, value)
    _refuse_unknown(config_type, settings)
    return settings


def _key_of(name: str, own: str) -> str | None:
    """The setting that a variable is of, with `_file` behind it where it names a file; None for one of others."""
    key = name.removeprefix(own if name.startswith(own) else ENVIRONMENT_PREFIX).lower()
    return key if name.startswith(own) or (name in _COMMON_VARIABLES and key != "config") else None


def _refuse_twice(name: str, environment: Mapping[str, str]) -> None:
    direct = name.removesuffix(_FILE.upper())
    if environment.get(direct):
        raise ConfigError(f"{name} and {direct}: both are set; one is allowed")


def _from_named_file(name: str, path: str) -> SettingValue:
    try:
        return SettingValue(Path(path).read_text().strip(), f"environment {name}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: {path}: {getattr(error, 'strerror', None) or error}") from None


def _refuse_unknown(config_type: type[Struct], settings: Mapping[str, SettingValue]) -> None:
    known = settings_of(config_type)
    for key, setting in settings.items():
        if key not in known:
            raise ConfigError(
                f"{key} (from {setting.source}): unknown key{near(key, known)}; docs/configuration.md has all"
            )


def near(key: str, known: Collection[str]) -> str:
    """What was probably meant, for a message; empty where nothing looks like it."""
    close = get_close_matches(key, known)
    return f", near are {', '.join(close)}" if len(close) > 1 else f", {close[0]} is near" if close else ""


def _build(config_type: type[C], settings: Mapping[str, SettingValue]) -> C:
    known = settings_of(config_type)
    values: dict[str, Any] = {}
    for key, given in settings.items():
        try:
            values[key] = known[key].parse(given.value)
        except ValueError as error:
            shown = "***" if "password" in key or key.endswith(("_key", "_keys")) else repr(given.value)
            raise ConfigError(f"{key} = {shown} (from {given.source}): {error}") from None
    missing = [name for name, setting in known.items() if setting.required and name not in values]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: must be set (by flag, environment or TOML file)")
    try:
        return config_type(**values)
    except ValueError as error:  # a struct's own __post_init__
        raise ConfigError(str(error)) from None
