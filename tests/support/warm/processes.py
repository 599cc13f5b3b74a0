"""The warm processes of one process of tests."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from deploy.supervisor.template.identity import NAME_MARK
from tests.support.paths import REPOSITORY

_LIBRARIES = "PYTHON OMP_ MKL_ OPENBLAS_ KMP_ TORCH PYTORCH_ CUDA_ HF_ TRITON_ LD_"
_READ_BY_LIBRARIES = tuple(_LIBRARIES.split())
"""Prefixes of variables that have had their effect in a warm process: what has others is started as always."""
_DEADLINE = 120.0
_ROOM = 2**15
"""Bytes, for the environment and the command line of a template."""


def read_by_libraries(environment: Mapping[str, str]) -> dict[str, str]:
    """What the libraries have read that a warm process has imported."""
    return {name: value for name, value in environment.items() if name.startswith(_READ_BY_LIBRARIES)}


class WarmProcesses(NamedTuple):
    """One for each kind of template."""

    folder: Path
    """Their sockets."""
    environment: Mapping[str, str]
    """That they were started with."""
    children: Sequence[subprocess.Popen[bytes]]

    def end(self) -> None:
        """Ends them; what they have forked goes on."""
        for child in self.children:
            child.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)


def baton_up(environment: Mapping[str, str]) -> Sequence[str]:
    """The command that is `baton` for a process with this environment; its templates are forked from warm processes
    where that is the same as starting them."""
    if not sys.platform.startswith("linux"):
        return [sys.executable, "-m", "deploy.cli"]
    warm = _started()
    if read_by_libraries(warm.environment) != read_by_libraries(environment):
        return [sys.executable, "-m", "deploy.cli"]
    return [sys.executable, "-m", "tests.support.warm.up", str(warm.folder)]


@cache
def _started() -> WarmProcesses:
    """They end with this process, as their standard input does."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    environment = dict(os.environ)
    shown = {**environment, "OPENBLAS_NUM_THREADS": "1", NAME_MARK: "/" * _ROOM}
    children = []
    for kind in ("services", "worker"):
        argv = [sys.executable, "-m", "tests.support.warm", str(folder / kind), kind, " " * _ROOM]
        with (folder / f"{kind}.log").open("wb") as log:
            children.append(
                subprocess.Popen(argv, cwd=REPOSITORY, env=shown, stdin=subprocess.PIPE, stdout=log, stderr=log)
            )
    warm = WarmProcesses(folder, environment, children)
    atexit.register(warm.end)
    deadline = time.monotonic() + _DEADLINE
    while not all((folder / f"{kind}.ready").exists() for kind in ("services", "worker")):
        lives = all(child.poll() is None for child in children)
        assert lives, [path.read_text() for path in folder.glob("*.log")]
        assert time.monotonic() < deadline, f"not within {_DEADLINE} s"
        time.sleep(0.02)
    return warm
