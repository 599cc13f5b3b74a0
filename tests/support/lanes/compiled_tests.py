"""What all processes of a run would make by themselves in a fresh clone is made at once, before they collect tests:
it takes as long as importing all that these import."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from _pytest.assertion import rewrite
from hypothesis.configuration import storage_directory
from hypothesis.internal.constants_ast import constants_from_module

from tests.support.paths import REPOSITORY

SOURCES = ("shared", "services", "kvstore", "deploy")
"""Packages whose constants hypothesis draws: it reads each module that is imported, and keeps what it has found."""


def compile_missing(config: pytest.Config, folder: Path = REPOSITORY / "tests") -> int:
    """Compiles each file of tests that pytest has not compiled yet, as pytest does, on all cores. Returns how many."""
    files = [path for name in ("test_*.py", "conftest.py") for path in folder.rglob(name)]
    missing = [path for path in files if not _compiled(path).exists()]
    _each_on_all_cores(lambda path: _compile(config, path), missing)
    return len(missing)


def keep_constants(folder: Path = REPOSITORY) -> int:
    """Where hypothesis has kept no constants yet, it keeps those of all modules. Returns of how many."""
    if storage_directory("constants").path.exists():
        return 0
    files = [path for package in SOURCES for path in (folder / package).rglob("*.py")]
    _each_on_all_cores(_keep_constants, files)
    return len(files)


def _compiled(path: Path) -> Path:
    """Where pytest looks for it."""
    return rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"


def _compile(config: pytest.Config, path: Path) -> None:
    compiled = _compiled(path)
    compiled.parent.mkdir(exist_ok=True)
    source, code = rewrite._rewrite_test(path, config)
    rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, compiled)


def _keep_constants(path: Path) -> None:
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    constants_from_module(module)


def _each_on_all_cores(work: Callable[[Path], None], paths: list[Path]) -> None:
    cores = os.cpu_count() or 1
    children = [_forked(work, paths[core::cores]) for core in range(min(cores, len(paths)))]
    for child in children:
        os.waitpid(child, 0)


def _forked(work: Callable[[Path], None], paths: list[Path]) -> int:
    """The pid of a process that does it; what has an error is left to those who collect it, who say so."""
    if pid := os.fork():
        return pid
    try:
        for path in paths:
            work(path)
    finally:
        os._exit(0)
