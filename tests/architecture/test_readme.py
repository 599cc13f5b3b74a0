"""README.md is short, and says nothing that no test of CI shows."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from deploy.cli.app import loaded
from deploy.model_choice import served_name
from services.worker.ops.native.build import Level
from tests.architecture.readme_claims import LAYOUTS, README, ROWS, SENTENCES, layouts, rows, sentences
from tests.support.paths import REPOSITORY

NOT_IN_CI = ("slow", "hosts", "ray")
FOLDERS_NOT_IN_CI = ("tests/hosts/", "tests/ray/", "tests/gpu/", "tests/benchmarks/", "tests/campaigns/")


def test_it_is_read_in_a_few_minutes() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 150


def test_every_sentence_has_tests_and_every_entry_a_sentence() -> None:
    found = {each: [start for start in SENTENCES if each.startswith(start)] for each in sentences()}
    assert {each: starts for each, starts in found.items() if len(starts) != 1} == {}
    assert {start for starts in found.values() for start in starts} == SENTENCES.keys()


def test_every_row_has_tests_and_every_entry_a_row() -> None:
    assert rows() == list(ROWS)


def test_every_layout_has_tests_and_every_entry_a_layout() -> None:
    assert layouts() == list(LAYOUTS)


@pytest.mark.parametrize(
    "test", sorted({each for table in (SENTENCES, ROWS, LAYOUTS) for tests in table.values() for each in tests})
)
def test_a_test_that_shows_a_claim_runs_in_ci(test: str) -> None:
    file, _, name = test.partition("::")
    assert not file.startswith(FOLDERS_NOT_IN_CI)
    marks, module = marks_of(REPOSITORY / file)
    assert module.isdisjoint(NOT_IN_CI)
    if name:
        assert name in marks, f"{file} has no {name}"
        assert marks[name].isdisjoint(NOT_IN_CI)
    else:
        assert any(each.isdisjoint(NOT_IN_CI) for each in marks.values())


@cache
def marks_of(file: Path) -> tuple[dict[str, frozenset[str]], frozenset[str]]:
    """The marks of each test of a file by its name, and those of all of them."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    marks: dict[str, frozenset[str]] = {}
    module: frozenset[str] = frozenset()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            marks[node.name] = frozenset(mark for each in node.decorator_list for mark in marks_in(each))
        elif isinstance(node, ast.Assign) and any(getattr(each, "id", "") == "pytestmark" for each in node.targets):
            module = marks_in(node.value)
    return marks, module


def marks_in(expression: ast.expr) -> frozenset[str]:
    """Of `pytest.mark.NAME`, called or not, alone or in a list. What marks only some parameters is left out."""
    nodes = expression.elts if isinstance(expression, ast.List) else [expression]
    named = (ast.unparse(node) for node in nodes)
    return frozenset(found[1] for text in named if (found := re.match(r"pytest\.mark\.(\w+)", text)))


@pytest.mark.parametrize("arguments", LAYOUTS)
def test_a_layout_is_one_that_baton_up_takes(arguments: str) -> None:
    values = loaded("up").make_context("up", arguments.split(), resilient_parsing=False).params
    named = [word.removeprefix("--").replace("-", "_") for word in arguments.split() if word.startswith("--")]
    assert all(values[name] not in (None, False) for name in named)


def test_make_up_installs_and_then_is_baton_up(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    planned = subprocess.run(
        ["make", "--dry-run", "up", f"VENV={tmp_path}/venv", "ARGS=--port 9000 --engines 2"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout.splitlines()
    made = next(index for index, line in enumerate(planned) if f"-m venv {tmp_path}/venv" in line)
    filled = next(index for index, line in enumerate(planned) if "-m deploy.set_up" in line)
    assert made < filled < len(planned) - 1
    assert planned[-1] == f"{tmp_path}/venv/bin/baton up --port 9000 --engines 2"


def test_python_is_the_one_that_the_package_asks_for() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">=3.11"


def test_what_a_model_may_be_called_is_told_apart(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    assert [served_name(each, None) for each in (None, str(folder), "Qwen/Qwen3-0.6B")] == [
        "baton-demo",
        "llama",
        "Qwen/Qwen3-0.6B",
    ]


def test_the_levels_of_instructions_are_those_that_are_compiled() -> None:
    row = next(line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| Devices"))
    named = re.findall(r"AVX-?\w+(?: BF16)?", row)
    assert named
    assert {each.lower().replace("avx-", "avx").replace(" ", "-") for each in named} <= set(get_args(Level))
