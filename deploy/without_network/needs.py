"""What Baton needs, as `pyproject.toml` says it, and what of that is never fetched. The standard library only."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
EXTRAS = ("worker", "kvstore", "cli", "plot")
TESTS = ("hypothesis", "jsonschema", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "transformers")
"""The development packages that GPU tests and benchmarks need."""
_LEFT_OUT = ("torch", "triton")
_LEFT_OUT_BEGINNINGS = ("nvidia-", "cuda-")
"""Packages that come with the machine: gigabytes that must fit its driver."""


class Project(NamedTuple):
    """Baton as a package: its name, its version and what it requires."""

    name: str
    version: str
    requirements: tuple[str, ...]


def project(repository: Path = REPOSITORY) -> Project:
    """Baton's metadata, with the requirements of the worker, the store, the command line, plots and the GPU tests."""
    described = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    optional = described["optional-dependencies"]
    wanted = [*described["dependencies"], *(each for extra in EXTRAS for each in optional[extra])]
    tests = [each for each in optional["dev"] if canonical(each) in TESTS]
    return Project(described["name"], described["version"], tuple(dict.fromkeys([*wanted, *tests])))


def canonical(requirement: str) -> str:
    """The normalized name of the package that a requirement names: `Jinja2>=3.1` is jinja2. Raises ValueError."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    if found is None:
        raise ValueError(f"{requirement!r} names no package")
    return re.sub(r"[-_.]+", "-", found.group()).lower()


def comes_with_the_machine(name: str, there: Iterable[str]) -> bool:
    """Whether a package is not fetched: it fits the machine's driver, or is in `there`, what the machine has."""
    return name in _LEFT_OUT or name.startswith(_LEFT_OUT_BEGINNINGS) or name in there


def names_in(path: Path | None) -> frozenset[str]:
    """Packages that a file lists, one or more a line, as `pip list` does, too; `#` begins a remark."""
    if path is None:
        return frozenset()
    lines = (line.partition("#")[0].strip(" ,") for line in path.read_text().splitlines())
    words = (re.split(r",\s*|\s+", line) for line in lines if line)
    return frozenset(canonical(word) for line in words for word in line if word[:1].isalpha())
