"""The build backend: setuptools' own, and then everything laid below one package, `baton`.

In the repository the packages are `shared`, `services`, `kvstore` and `deploy`: names that others use, too. In a wheel
they are `baton.shared` and so on: files are moved, imports and names of modules in strings get the prefix. An editable
wheel only gets `baton` itself. Needs setuptools and the standard library only, as it runs before anything is installed
(PEP 517, PEP 660).
"""

from __future__ import annotations

import base64
import configparser
import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

from deploy.wheel.names import LIBRARY, PACKAGES, TOP, library_package, renamed

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """The wheel's file name, as PEP 517 wants it."""
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    _rewrite(Path(wheel_directory, name), _below_one_name)
    return name


def build_editable(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """The wheel's file name, as PEP 660 wants it. The four packages keep their names, as they are used in place."""
    name: str = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    _rewrite(Path(wheel_directory, name), lambda files: {**files, **library_package(LIBRARY)})
    return name


def _below_one_name(files: Mapping[str, bytes]) -> dict[str, bytes]:
    modules = {_module(name) for name in files if name.endswith(".py")}
    made = {}
    for name, content in files.items():
        if name.split("/")[0] in PACKAGES:
            text = content
            if name.endswith(".py"):
                text = renamed(content.decode(), modules).encode()
            made[f"{TOP}/{name}"] = text
        elif name.endswith(".dist-info/entry_points.txt"):
            made[name] = _entry_points(content.decode()).encode()
        elif name.endswith(".dist-info/top_level.txt"):
            made[name] = f"{TOP}\n".encode()
        else:
            made[name] = content
    return {**made, **library_package(f"{TOP}.{LIBRARY}")}


def _module(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _entry_points(text: str) -> str:
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    for section in parser.sections():
        for name, target in parser.items(section):
            parser[section][name] = f"{TOP}.{target}"
    written = io.StringIO()
    parser.write(written)
    return written.getvalue()


def _rewrite(wheel: Path, change: Any) -> None:
    """Replaces the wheel by one of the changed files, with a new RECORD."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
        modes = {entry.filename: entry.external_attr for entry in archive.infolist()}
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    changed = change({name: content for name, content in files.items() if name != record})
    lines = [_recorded(name, content) for name, content in changed.items()]
    changed[record] = "".join([*lines, f"{record},,\n"]).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in changed.items():
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.external_attr = modes.get(name, modes[record])
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)


def _recorded(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"
