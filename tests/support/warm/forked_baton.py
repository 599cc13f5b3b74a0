"""`baton` forked of the fork server of a process of tests, which has imported what it needs: importing takes most of
the processor time of a command, and of a stack's start."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from runpy import run_module

from deploy import cli
from deploy.supervisor.template.identity import show_elsewhere
from shared.config import replace_environment
from tests.support.lanes import forked_server
from tests.support.paths import REPOSITORY
from tests.support.warm.processes import PYTHONPATH, read_by_libraries

_READ_AT_IMPORT = read_by_libraries(os.environ)
"""What a command needs in its environment as it is in the fork server; a supervisor only hands it on."""
_STARTED = ("up", "join", "bench", "chaos")
"""These start others as they were started themselves."""


class ForkedBaton:
    """What a test does with a `subprocess.Popen`."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self._process = process
        self.pid: int = process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired("baton", timeout or 0.0)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a fork server is there that was forked itself (one that is started would import all of it first), and
    the environment has no folders of packages but the tests' own."""
    return forked_server.is_there() and environment.get("PYTHONPATH", "") == PYTHONPATH


def fork_baton(
    argv: Sequence[str],
    environment: Mapping[str, str],
    out: Path,
    err: Path,
    *,
    prepare: Callable[[], None] | None = None,
    ends_with_tests: bool = False,
) -> ForkedBaton:
    """`argv`, PYTHON -m MODULE …, as for a process of its own; what it says is added to the files. `prepare` is called
    in it."""
    arguments = list(argv), dict(environment), (out, err), prepare
    context = multiprocessing.get_context("forkserver")
    process = context.Process(
        target=_become, args=arguments, daemon=ends_with_tests
    )  # a daemon has no children so made
    process.start()
    return ForkedBaton(process)


def run_baton(*words: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """What `baton WORDS…` says, in a process of its own where it cannot be forked. Raises subprocess.TimeoutExpired."""
    argv = [sys.executable, "-m", cli.__name__, *words]
    environment = dict(os.environ)
    if words[0] in _STARTED or not can_fork(environment) or read_by_libraries(environment) != _READ_AT_IMPORT:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.run(argv, cwd=REPOSITORY, text=True, timeout=timeout, check=False, **pipes)
    with tempfile.TemporaryDirectory(prefix="baton-said-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = fork_baton(argv, environment, out, err)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise subprocess.TimeoutExpired(argv, timeout, out.read_bytes(), err.read_bytes()) from None
        return subprocess.CompletedProcess(argv, status, out.read_text(), err.read_text())


def _become(
    argv: list[str], environment: dict[str, str], said: tuple[Path, Path], prepare: Callable[[], None] | None
) -> None:
    """What `exec` would do; what it raises, `multiprocessing` makes a status of."""
    atexit._clear()
    os.setsid()
    if prepare is not None:
        prepare()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in enumerate((Path(os.devnull), *said)):
        with path.open("rb" if number == 0 else "ab") as file:
            os.dup2(file.fileno(), number)
    os.chdir(REPOSITORY)
    replace_environment(environment)
    show_elsewhere(argv, environment)
    sys.argv[:] = argv[2:]
    try:
        run_module(argv[2], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
