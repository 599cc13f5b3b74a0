"""A command of `baton` forked of the fork server of a process of tests: importing takes most of its processor time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from deploy import cli
from shared.config import replace_environment
from tests.support.lanes import forked_server
from tests.support.paths import REPOSITORY
from tests.support.warm.processes import read_by_libraries

_AT_IMPORT = dict(os.environ)
_STARTED = ("up", "join", "bench", "chaos")
"""These start others as they were started themselves."""


def run_baton(*argv: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """What `baton ARGV…` says; in a process of its own where there is no fork server, or the environment is not the one
    that libraries have read there. Raises subprocess.TimeoutExpired."""
    if not forked_server.is_there() or argv[0] in _STARTED or _read(_AT_IMPORT) != _read(dict(os.environ)):
        return subprocess.run(
            [sys.executable, "-m", cli.__name__, *argv],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    with tempfile.TemporaryDirectory(prefix="baton-said-") as folder:
        said = Path(folder, "out"), Path(folder, "err")
        process = multiprocessing.get_context("forkserver").Process(target=_become, args=(argv, dict(os.environ), said))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(["baton", *argv], timeout, *(each.read_bytes() for each in said))
        out, err = (each.read_text() for each in said)
        return subprocess.CompletedProcess(["baton", *argv], process.exitcode, out, err)


def _read(environment: dict[str, str]) -> tuple[dict[str, str], str | None]:
    return read_by_libraries(environment), environment.get("PYTHONPATH")


def _become(argv: Sequence[str], environment: dict[str, str], said: tuple[Path, Path]) -> None:
    """What `exec` would do; what `main` raises, `multiprocessing` makes a status of."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in enumerate((Path(os.devnull), *said)):
        with path.open("rb" if number == 0 else "wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdin = os.fdopen(0, "r", encoding="utf-8", closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
    os.chdir(REPOSITORY)
    replace_environment(environment)
    sys.argv[:] = [cli.__file__, *argv]
    cli.main()
