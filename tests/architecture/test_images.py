"""Each service's image holds every module of ours that the service may import, and its extra the packages of others."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

OURS = ("services", "shared", "kvstore", "deploy")
ENTRY = {
    **{name: f"services.{name}" for name in ("gateway", "tokenizer", "coordinator", "scheduler", "detokenizer")},
    "kvstore": "kvstore",
    "worker": "services.worker",
    "encoder": "services.encoder",
}
DISTRIBUTIONS = {
    "google": "protobuf",
    "PIL": "pillow",
    "huggingface_hub": "huggingface-hub",
    "prometheus_client": "prometheus-client",
    "nats": "nats-py",
    "grpc": "grpcio",
    "opentelemetry": "opentelemetry-sdk",
    "python_multipart": "python-multipart",
}
"""Of packages whose import name is not that of the distribution."""
IN_ALL = ("otel",)
"""Extras of every image."""
EXTRAS = {
    "worker": ("worker",),
    "kvstore": ("kvstore",),
    "gateway": ("overflow", "images", "audio", "database"),
    "encoder": ("encoder",),
}
"""Those that the image of a service has beside these."""
OPTIONAL = {"triton", "flash_attn", "flashinfer"}
"""Imported only where they are found."""


def copied(target: str) -> tuple[Path, ...]:
    """What lies below the project's root in the image of `target`, its base's included."""
    stages: dict[str, tuple[str, list[str]]] = {}
    lines: list[str] = []
    for line in (REPOSITORY / "deploy/Dockerfile").read_text(encoding="utf-8").splitlines():
        if start := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            lines = []
            stages[start[2]] = (start[1], lines)
        elif (copy := re.fullmatch(r"COPY ((?!--)\S+(?: \S+)*) \S+", line)) is not None:
            lines += copy[1].split()
    paths: list[Path] = []
    while target in stages:
        target, lines = stages[target]
        paths += [REPOSITORY / line for line in lines]
    return tuple(paths)


@cache
def imported(file: Path, package: str) -> tuple[str, ...]:
    """Modules that `file` of `package` imports anywhere, types alone excepted."""
    return tuple(_imported(file, package))


def _imported(file: Path, package: str) -> Iterator[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import in {package}"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def located(module: str) -> Path | None:
    """The file of one of our modules; None where the name is a class or a function."""
    path = REPOSITORY.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def reachable(entry: str) -> tuple[set[Path], set[str]]:
    """Our files, and the top names of other packages, that running `python -m entry` may import."""
    waiting, files, others = [f"{entry}.__main__", entry], set[Path](), set[str]()
    while waiting:
        module = waiting.pop()
        if module.partition(".")[0] not in OURS:
            others.add(module.partition(".")[0])
            continue
        if "." in module:
            waiting.append(module.rpartition(".")[0])
        file = located(module)
        if file is not None and file not in files:
            files.add(file)
            waiting += imported(file, module)
    return files, others - sys.stdlib_module_names - {"__future__"}


def required(extras: tuple[str, ...]) -> set[str]:
    """Distributions that the project and some of its extras name."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    return {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in named}


@pytest.mark.parametrize("target", ENTRY)
def test_an_image_holds_what_its_service_imports(target: str) -> None:
    held = copied(target)
    files, _ = reachable(ENTRY[target])
    assert len(files) > 5
    missing = {
        str(file.relative_to(REPOSITORY)) for file in files if not any(file.is_relative_to(path) for path in held)
    }
    assert missing == set()


@pytest.mark.parametrize("target", ENTRY)
def test_a_service_imports_only_packages_that_its_image_installs(target: str) -> None:
    _, others = reachable(ENTRY[target])
    assert {DISTRIBUTIONS.get(name, name) for name in others - OPTIONAL} <= required((*IN_ALL, *EXTRAS.get(target, ())))


def test_an_image_without_a_folder_is_noticed() -> None:
    held = copied("gateway")
    files, _ = reachable(ENTRY["worker"])
    assert any(not file.is_relative_to(path) for file in files for path in held)
    assert all(path.exists() for path in held)
