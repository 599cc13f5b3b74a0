"""Compiles all tests at once, before several processes collect them: in a fresh clone each would do that by itself, and
it takes as long as importing all that they import."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.support.paths import REPOSITORY


def compile_missing(config: pytest.Config, folder: Path = REPOSITORY / "tests") -> int:
    """Compiles each file of tests that pytest has not compiled yet, as pytest does, on all cores. Returns how many."""
    files = [path for name in ("test_*.py", "conftest.py") for path in folder.rglob(name)]
    missing = [path for path in files if not _compiled(path).exists()]
    cores = os.cpu_count() or 1
    children = [_forked(config, missing[core::cores]) for core in range(min(cores, len(missing)))]
    for child in children:
        os.waitpid(child, 0)
    return len(missing)


def _compiled(path: Path) -> Path:
    """Where pytest looks for it."""
    return rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"


def _forked(config: pytest.Config, paths: list[Path]) -> int:
    """The pid of a process that compiles them; what has an error is left to those who collect it, who say so."""
    if pid := os.fork():
        return pid
    try:
        for path in paths:
            compiled = _compiled(path)
            compiled.parent.mkdir(exist_ok=True)
            source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, compiled)
    finally:
        os._exit(0)
