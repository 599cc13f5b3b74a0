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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from shared.bus.nats_bus import NatsOptions
from shared.ids import InstanceId, checked_instance

ENVIRONMENT_PREFIX = "BATON_"

ByteSize = Annotated[int, Meta(ge=0, extra={"unit": "bytes"})]
"""Bytes; written as a number or with a unit: 512MiB, 2GiB, 1.5GB."""

Port = Annotated[int, Meta(ge=0, le=65535)]

C = TypeVar("C", bound="ServiceConfig")


class ConfigError(Exception):
    """A start-up setting that cannot be used; the text names key, value and source."""


class ServiceConfig(Struct, frozen=True, kw_only=True):
    """What every service is told. Also readable from a TOML file's top level and as BATON_<KEY>."""

    instance: Annotated[str, Meta(description="Name of this process on the bus; unique.")] = ""
    nats_url: Annotated[
        tuple[str, ...],
        Meta(min_length=1, description="NATS servers, comma-separated; user:password@ is allowed."),
    ] = ("nats://127.0.0.1:4222",)
    nats_user: Annotated[str | None, Meta(description="NATS user.")] = None
    nats_password: Annotated[str | None, Meta(description="NATS password; better by environment than by flag.")] = None
    nats_creds: Annotated[str | None, Meta(description="NATS .creds file.")] = None
    nats_ca: Annotated[str | None, Meta(description="CA file; switches TLS on.")] = None
    nats_connect_timeout: Annotated[float, Meta(gt=0, description="Seconds to wait for a first connection.")] = 10.0
    namespace: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]+$", description="First token of every subject.")] = "baton"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Least level logged.")] = "info"
    metrics_host: Annotated[str, Meta(description="Address of the Prometheus endpoint.")] = "127.0.0.1"
    metrics_port: Annotated[
        Port | None, Meta(description="Port of the Prometheus endpoint; 0 picks one, none switches it off.")
    ] = 0
    drain_timeout: Annotated[float, Meta(ge=0, description="Seconds to finish work in hand when told to stop.")] = 30.0
    supervisor_fd: Annotated[
        int | None, Meta(description="Pipe whose end of file means that the supervisor is gone.")
    ] = None

    def nats_options(self) -> NatsOptions:
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
        return checked_instance(self.instance)


COMMON_KEYS = frozenset(field.name for field in msgspec.structs.fields(ServiceConfig))


class _Setting(NamedTuple):
    value: Any
    source: str


def load_config(
    service: str,
    config_type: type[C],
    argv: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> C:
    """The service's configuration. Raises ConfigError; `--help` prints every flag and exits.

    `--config FILE` (or BATON_CONFIG) names a TOML file: common keys at its top level, others in table `[service]`.
    """
    environment = os.environ if environment is None else environment
    flags = _parse_flags(service, config_type, argv)
    file = flags.pop("config", None) or environment.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    settings: dict[str, _Setting] = {}
    if file:
        settings.update(_from_file(service, config_type, Path(file)))
    settings.update(_from_environment(service, config_type, environment))
    settings.update({key: _Setting(value, f"--{key.replace('_', '-')}") for key, value in flags.items()})
    settings.setdefault("instance", _Setting(_default_instance(service), "default"))
    return _build(config_type, settings)


def load_or_exit(service: str, config_type: type[C]) -> C:
    """`load_config` from the process's own arguments; a bad setting is printed and ends the process with status 2."""
    try:
        return load_config(service, config_type, sys.argv[1:])
    except ConfigError as error:
        print(f"{service}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def process_environment() -> dict[str, str]:
    """A copy of this process's environment, for children of the supervisor to inherit."""
    return dict(os.environ)


def _default_instance(service: str) -> str:
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:32]
    return f"{service}-{host}-{os.getpid()}"


class _Flags(argparse.ArgumentParser):
    """Says what is wrong in one line; a page of every flag would hide it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} ({self.prog} --help shows every flag)")


def _parse_flags(service: str, config_type: type[Struct], argv: Sequence[str]) -> dict[str, Any]:
    package = config_type.__module__.rpartition(".")[0] or service
    parser = _Flags(prog=f"python -m {package}", argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings.")
    for field in msgspec.structs.fields(config_type):
        flag = "--" + field.name.replace("_", "-")
        default = "" if field.default in (None, "", msgspec.NODEFAULT) else f" (default: {_shown(field.default)})"
        described = (_description(field.type) + default).replace("%", "%%")
        if _plain_type(field.type) is bool:
            parser.add_argument(flag, dest=field.name, action=argparse.BooleanOptionalAction, help=described)
        else:
            parser.add_argument(flag, dest=field.name, metavar="VALUE", help=described)
    return vars(parser.parse_args(argv))


def _from_file(service: str, config_type: type[Struct], path: Path) -> dict[str, _Setting]:
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    settings: dict[str, _Setting] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            if key == service:
                settings.update({k: _Setting(v, f"{path} [{service}]") for k, v in value.items()})
        elif key in COMMON_KEYS:
            settings.setdefault(key, _Setting(value, str(path)))
        else:
            raise ConfigError(f"{key} (from {path}): unknown key; at the top level {', '.join(sorted(COMMON_KEYS))}")
    _refuse_unknown(config_type, settings)
    return settings


def _from_environment(service: str, config_type: type[Struct], environment: Mapping[str, str]) -> dict[str, _Setting]:
    own = f"{ENVIRONMENT_PREFIX}{service.upper()}_"
    common = {f"{ENVIRONMENT_PREFIX}{key.upper()}": key for key in COMMON_KEYS}
    settings = {
        key: _Setting(environment[name], f"environment {name}") for name, key in common.items() if name in environment
    }
    for name, value in environment.items():
        if name.startswith(own):
            settings[name.removeprefix(own).lower()] = _Setting(value, f"environment {name}")
    _refuse_unknown(config_type, settings)
    return settings


def _refuse_unknown(config_type: type[Struct], settings: Mapping[str, _Setting]) -> None:
    known = {field.name for field in msgspec.structs.fields(config_type)}
    for key, setting in settings.items():
        if key not in known:
            raise ConfigError(f"{key} (from {setting.source}): unknown key; known are {', '.join(sorted(known))}")


def _build(config_type: type[C], settings: Mapping[str, _Setting]) -> C:
    types = get_type_hints(config_type, include_extras=True)
    values: dict[str, Any] = {}
    for key, setting in settings.items():
        try:
            parsed, wanted = _parsed(setting.value, types[key]), _bounded_inside(types[key])
            values[key] = msgspec.convert(parsed, wanted, strict=False, dec_hook=_path)
        except (msgspec.ValidationError, ValueError) as error:
            shown = "***" if "password" in key else repr(setting.value)
            raise ConfigError(f"{key} = {shown} (from {setting.source}): {error}") from None
    missing = [f.name for f in msgspec.structs.fields(config_type) if f.required and f.name not in values]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: must be set (by flag, environment or TOML file)")
    try:
        return config_type(**values)
    except ValueError as error:  # a struct's own __post_init__
        raise ConfigError(str(error)) from None


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(text: str) -> int:
    """`2GiB`, `512MB`, `1048576` as bytes. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].lower() not in _UNITS:
        raise ValueError("a size is a number with an optional unit such as 512MiB, 2GiB or 1.5GB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _parsed(value: Any, annotated: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value == "" or value.lower() == "none":
        options = get_args(_strip(annotated))
        if type(None) in options:
            return None
    if _is_bytes(annotated):
        return parse_bytes(value)
    if get_origin(_plain_type(annotated)) is tuple:
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _path(wanted: type, value: Any) -> Any:
    """What msgspec cannot make by itself; only paths are."""
    if wanted is not Path or not isinstance(value, str):
        raise ValueError(f"a {wanted.__name__} is expected, not {type(value).__name__}")
    return Path(value)


def _bounded_inside(annotated: Any) -> Any:
    """`Annotated[int | None, Meta(ge=1)]` as `Annotated[int, Meta(ge=1)] | None`: a union has no bounds for msgspec."""
    plain = _plain_type(annotated)
    if type(None) not in get_args(_strip(annotated)) or get_origin(annotated) is not Annotated:
        return annotated
    inner = next((each for each in get_args(_strip(annotated)) if each is not type(None)), plain)
    return Annotated[(inner, *get_args(annotated)[1:])] | None


def _strip(annotated: Any) -> Any:
    return get_args(annotated)[0] if get_origin(annotated) is Annotated else annotated


def _plain_type(annotated: Any) -> Any:
    """The type without Annotated and without None."""
    bare = _strip(annotated)
    if get_origin(bare) in (Union, UnionType):
        others = [_plain_type(option) for option in get_args(bare) if option is not type(None)]
        return others[0] if len(others) == 1 else bare
    return bare


def _metas(annotated: Any) -> list[Meta]:
    metas = [m for m in get_args(annotated)[1:] if isinstance(m, Meta)] if get_origin(annotated) is Annotated else []
    bare = _strip(annotated)
    if get_origin(bare) in (Union, UnionType):
        for option in get_args(bare):
            metas += _metas(option)
    return metas


def _is_bytes(annotated: Any) -> bool:
    return any((meta.extra or {}).get("unit") == "bytes" for meta in _metas(annotated))


def _description(annotated: Any) -> str:
    text = next((meta.description for meta in _metas(annotated) if meta.description), "")
    plain = _plain_type(annotated)
    return f"{text} One of {', '.join(map(str, get_args(plain)))}." if get_origin(plain) is Literal else text


def _shown(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
