"""What a setting is: a field of a service's frozen struct, which alone says its type, default, limits and meaning.

Whatever else names a setting is made from these fields: command lines, environment variables, TOML keys, the options
of `baton up`, the variables of the containers and the reference page.

    class GatewayConfig(ServiceConfig, frozen=True, kw_only=True):
        max_body: Annotated[ByteSize, Meta(description="Size of a request's body."), UpOption("Capacity")] = 16 * 2**20
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

ByteSize = Annotated[int, Meta(ge=0, extra={"unit": "bytes"})]
"""Bytes; written as a number or with a unit: 512MiB, 2GiB, 1.5GB."""

Port = Annotated[int, Meta(ge=0, le=65535)]


class UpOption(NamedTuple):
    """Makes a setting an option of `baton up`, or of the command that it is a setting of. Every other one of a service
    is reached by `--set SERVICE.KEY=VALUE`."""

    panel: str | None = None
    """Heading that `baton up --help` shows it under."""
    name: str | None = None
    """The option's name if it is not the setting's name. Settings of one name all get the value."""
    placed: bool = False
    """The supervisor computes each process's value from it; other options are passed to the service unchanged."""
    unset: str | None = None
    """What applies if the option is not given, if that is not the setting's default."""
    environment: str | None = None
    """Variable that gives the option a value, for secrets that should not appear on a command line."""


class ContainerVariable(NamedTuple):
    """Makes a setting a variable of docker-compose.yml, explained in .env.example."""

    name: str | None = None
    """BATON_ and the setting's name, unless given."""
    default: str | None = None
    """The default as text, if containers have another one than the service."""


class Setting(NamedTuple):
    """One field of a configuration struct."""

    name: str
    annotation: Any
    default: Any
    """msgspec.NODEFAULT where it must be set."""

    @property
    def flag(self) -> str:
        """The setting's flag on the command line, such as `--max-body`."""
        return "--" + self.name.replace("_", "-")

    @property
    def meaning(self) -> str:
        """What the setting does, in one or two sentences."""
        return next((meta.description for meta in _metas(self.annotation) if meta.description), "")

    @property
    def description(self) -> str:
        """`meaning`, followed by the allowed values where they are few."""
        choices = ", ".join(map(str, self.choices))
        return f"{self.meaning} One of {choices}." if choices else self.meaning

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a Literal; empty for any other type."""
        return get_args(self.plain_type) if get_origin(self.plain_type) is Literal else ()

    @property
    def plain_type(self) -> Any:
        """The type without Annotated and without None."""
        return _plain_type(self.annotation)

    @property
    def is_bytes(self) -> bool:
        """Whether it is written as a size: 512MiB."""
        return any((meta.extra or {}).get("unit") == "bytes" for meta in _metas(self.annotation))

    @property
    def may_be_none(self) -> bool:
        """Whether `none` is a value of it."""
        return type(None) in get_args(_strip(self.annotation))

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is msgspec.NODEFAULT

    @property
    def default_text(self) -> str:
        """The default as one types it; empty for none, for no text and where there is no default."""
        if self.default in (None, "", (), msgspec.NODEFAULT):
            return ""
        if self.is_bytes:
            return size_text(self.default)
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return ",".join(map(str, self.default)) if isinstance(self.default, tuple) else str(self.default)

    def limit(self, name: str) -> float | None:
        """`ge`, `gt`, `le` or `lt`, where the setting is bounded so."""
        bounds = (getattr(meta, name) for meta in _metas(self.annotation))
        return next((bound for bound in bounds if bound is not None), None)

    @property
    def limits(self) -> str:
        """Its bounds for people: `≥ 1, ≤ 32`."""
        signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
        return ", ".join(f"{sign} {self.limit(name):g}" for name, sign in signs.items() if self.limit(name) is not None)

    @property
    def up_option(self) -> UpOption | None:
        """How `baton up` offers it; None where it does not."""
        return next((each for each in _extras(self.annotation) if isinstance(each, UpOption)), None)

    @property
    def container_variable(self) -> ContainerVariable | None:
        """How docker-compose.yml offers it; None where it does not."""
        return next((each for each in _extras(self.annotation) if isinstance(each, ContainerVariable)), None)

    def parse(self, value: Any) -> Any:
        """Parses a text or a TOML value as the setting's value. Raises ValueError for a value that is not allowed."""
        parsed, wanted = self._from_text(value), _bounded_inside(self.annotation)
        try:
            return msgspec.convert(parsed, wanted, strict=False, dec_hook=_path)
        except msgspec.ValidationError as error:
            choices = ("true", "false") if self.plain_type is bool else self.choices
            allowed = f"; one of {', '.join(map(str, choices))} is expected" if choices else ""
            raise ValueError(f"{error}{allowed}") from None

    def _from_text(self, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if self.may_be_none and (value == "" or value.lower() == "none"):
            return None
        if self.is_bytes:
            return parse_bytes(value)
        if get_origin(self.plain_type) is tuple:
            return [part.strip() for part in value.split(",") if part.strip()]
        return value


@cache
def settings_of(struct: type[Struct]) -> dict[str, Setting]:
    """All settings of a configuration struct, by name, in their order."""
    return {field.name: Setting(field.name, field.type, field.default) for field in msgspec.structs.fields(struct)}


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(text: str) -> int:
    """`2GiB`, `512MB`, `1048576` as bytes. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].lower() not in _UNITS:
        raise ValueError("a size is a number with an optional unit such as 512MiB, 2GiB or 1.5GB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def size_text(size: int) -> str:
    """Bytes in the largest unit that needs no fraction: `512MiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _UNITS[unit.lower()] == 0:
            return f"{size // _UNITS[unit.lower()]}{unit}"
    return str(size)


def _path(wanted: type, value: Any) -> Any:
    """What msgspec cannot make by itself; only paths are."""
    if wanted is not Path or not isinstance(value, str):
        raise ValueError(f"a {wanted.__name__} is expected, not {type(value).__name__}")
    return Path(value)


def _bounded_inside(annotated: Any) -> Any:
    """`Annotated[int | None, Meta(ge=1)]` as `Annotated[int, Meta(ge=1)] | None`: a union has no bounds for msgspec."""
    if get_origin(annotated) is not Annotated or type(None) not in get_args(_strip(annotated)):
        return annotated
    inner = next(each for each in get_args(_strip(annotated)) if each is not type(None))
    return Annotated[(inner, *get_args(annotated)[1:])] | None


def _strip(annotated: Any) -> Any:
    return get_args(annotated)[0] if get_origin(annotated) is Annotated else annotated


def _plain_type(annotated: Any) -> Any:
    bare = _strip(annotated)
    if get_origin(bare) in (Union, UnionType):
        others = [_plain_type(option) for option in get_args(bare) if option is not type(None)]
        return others[0] if len(others) == 1 else bare
    return bare


def _extras(annotated: Any) -> list[Any]:
    """All that stands beside the type, in a union's members, too."""
    found = list(get_args(annotated)[1:]) if get_origin(annotated) is Annotated else []
    bare = _strip(annotated)
    if get_origin(bare) in (Union, UnionType):
        for option in get_args(bare):
            found += _extras(option)
    return found


def _metas(annotated: Any) -> list[Meta]:
    return [each for each in _extras(annotated) if isinstance(each, Meta)]
