"""The warm processes of one run of tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from deploy.supervisor.template.identity import NAME_MARK
from tests.support.paths import REPOSITORY

_LIBRARIES = "PYTHON OMP_ MKL_ OPENBLAS_ KMP_ TORCH PYTORCH_ CUDA_ HF_ TRITON_ LD_"
_READ_BY_LIBRARIES = tuple(_LIBRARIES.split())
"""Prefixes of variables that have had their effect in a warm process: what has others is started as always."""
_KINDS = ("services", "worker")
_DEADLINE = 120.0
PYTHONPATH = os.environ.get("PYTHONPATH", "")
"""That of the tests' process, before any test changes it."""
UP = "tests.support.warm.up"
"""`baton` whose templates are forked from warm processes."""
_ROOM = 2**15
"""Bytes, for the environment and the command line of a template."""


def read_by_libraries(environment: Mapping[str, str]) -> dict[str, str]:
    """What the libraries have read that a warm process has imported; what is forked gets folders of packages itself."""
    found = {name: value for name, value in environment.items() if name.startswith(_READ_BY_LIBRARIES)}
    return {name: value for name, value in found.items() if name != "PYTHONPATH"}


class WarmProcesses(NamedTuple):
    """One for each kind of template."""

    folder: Path
    """Their sockets."""
    environment: Mapping[str, str]
    """That they were started with."""


def baton_up(environment: Mapping[str, str]) -> Sequence[str]:
    """The command that is `baton` for a process with this environment; its templates are forked from warm processes
    where that is the same as starting them."""
    if not sys.platform.startswith("linux"):
        return [sys.executable, "-m", "deploy.cli"]
    warm = _started()
    if read_by_libraries(warm.environment) != read_by_libraries(environment):
        return [sys.executable, "-m", "deploy.cli"]
    return [sys.executable, "-m", UP, str(warm.folder)]


@cache
def _started() -> WarmProcesses:
    """They end with this process, or with that of pytest whose workers share them: whichever needs them first starts
    them for all."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return _start(Path(tempfile.mkdtemp(prefix="warm-")), os.getpid())
    folder = Path(tempfile.gettempdir(), f"warm-{run}")
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return _awaited(folder, [])
    return _start(folder, os.getppid())


def _start(folder: Path, owner: int) -> WarmProcesses:
    environment = dict(os.environ)
    shown = {**environment, "PYTHONPATH": PYTHONPATH, "OPENBLAS_NUM_THREADS": "1", NAME_MARK: "/" * _ROOM}
    children = []
    for kind in _KINDS:
        argv = [sys.executable, "-m", "tests.support.warm", str(folder / kind), kind, str(owner), " " * _ROOM]
        with (folder / f"{kind}.log").open("wb") as log:
            children.append(
                subprocess.Popen(argv, cwd=REPOSITORY, env=shown, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )
    written = folder / "environment"
    written.with_suffix(".part").write_bytes(msgspec.json.encode(environment))
    written.with_suffix(".part").rename(written)
    return _awaited(folder, children)


def _awaited(folder: Path, children: Sequence[subprocess.Popen[bytes]]) -> WarmProcesses:
    """`children`: those that are started, where that is known here."""
    deadline = time.monotonic() + _DEADLINE
    expected = [folder / "environment", *(folder / f"{kind}.ready" for kind in _KINDS)]
    while not all(path.exists() for path in expected):
        lives = all(child.poll() is None for child in children)
        assert lives, [path.read_text() for path in folder.glob("*.log")]
        assert time.monotonic() < deadline, f"not within {_DEADLINE} s"
        time.sleep(0.02)
    for child in children:
        child.returncode = 0  # it outlives this process, of which Python would warn
    return WarmProcesses(folder, msgspec.json.decode(expected[0].read_bytes(), type=dict[str, str]))
