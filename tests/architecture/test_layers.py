"""The architecture that a check keeps, beside the contracts of import-linter."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deploy.configuration import CONFIGS
from shared.config import ServiceConfig
from tests.architecture.house import parsed
from tests.support.paths import REPOSITORY

OURS = ("shared", "services", "kvstore", "deploy")
LIGHT = ("gateway", "tokenizer", "coordinator", "scheduler", "detokenizer")
HEAVY_MODULES = {"torch", "transformers", "triton", "numpy", "safetensors", "aiohttp"}
NAMELESS = {"utils", "helpers", "common", "misc", "manager"}


def sources() -> list[Path]:
    return [path for folder in OURS for path in (REPOSITORY / folder).rglob("*.py")]


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    """Of sources that hold anything. A fixture: behind the last test that reads them, 200 MB are free again."""
    texts = {path: text for path in sources() if (text := path.read_text()).strip()}
    return dict(zip(texts, parsed(texts.values()), strict=True))


@pytest.mark.parametrize("service", LIGHT)
def test_a_light_service_loads_no_heavy_library(service: str) -> None:
    program = f"import sys, services.{service}.__main__; print(*sorted({HEAVY_MODULES!r} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    assert loaded.stdout.split() == []


def test_a_worker_loads_no_heavy_library_before_it_knows_its_device() -> None:
    program = f"import sys, services.worker.__main__; print(*sorted({HEAVY_MODULES!r} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    assert loaded.stdout.split() == []


def test_a_kv_store_loads_no_heavy_library_and_none_for_what_it_is_not_told_to_use() -> None:
    unwanted = HEAVY_MODULES | {"grpc", "redis"}
    program = f"import sys, kvstore.__main__; print(*sorted({unwanted!r} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    assert loaded.stdout.split() == []


def test_every_file_says_in_its_first_lines_what_it_is(trees: dict[Path, ast.Module]) -> None:
    silent = [str(path.relative_to(REPOSITORY)) for path, tree in trees.items() if not ast.get_docstring(tree)]
    assert silent == []


def test_only_the_configuration_reads_the_environment(trees: dict[Path, ast.Module]) -> None:
    readers = {
        str(path.relative_to(REPOSITORY))
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    }
    assert readers <= {"shared/config.py"}


def test_every_metric_of_a_service_is_in_its_registry(trees: dict[Path, ast.Module]) -> None:
    """Else processes of other services that import its module show it, too, and for ever 0."""
    outside = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path, tree in trees.items()
        if "shared" not in path.relative_to(REPOSITORY).parts
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("Counter", "Gauge", "Histogram")
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and "registry" not in {keyword.arg for keyword in node.keywords}
    ]
    assert outside == []


def test_no_service_gives_a_setting_of_all_services_another_meaning() -> None:
    common = set(ServiceConfig.__struct_fields__)
    assert {s: again for s, c in CONFIGS.items() if (again := common & set(c.__annotations__))} == {}


def test_no_module_goes_by_a_name_that_says_nothing() -> None:
    assert [str(p.relative_to(REPOSITORY)) for p in sources() if NAMELESS & set(p.stem.split("_"))] == []


def test_no_file_is_one_that_one_would_be_afraid_to_open() -> None:
    lengths = {str(p.relative_to(REPOSITORY)): len(p.read_text().splitlines()) for p in sources()}
    assert {name: n for name, n in lengths.items() if n > 500} == {}


def test_the_architecture_page_stays_short() -> None:
    assert len((REPOSITORY / "ARCHITECTURE.md").read_text().splitlines()) <= 150


def test_one_package_alone_composes_services_and_every_other_is_kept_apart() -> None:
    packages = {f"services.{path.parent.name}" for path in (REPOSITORY / "services").glob("*/__init__.py")}
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    apart = next(set(contract["modules"]) for contract in contracts if contract["type"] == "independence")
    assert packages - apart == {"services.offline"}
