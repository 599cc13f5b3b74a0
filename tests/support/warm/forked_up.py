"""`baton up` forked of the fork server of a process of tests, which has imported what it needs: a supervisor takes most
of the processor time of a start for its imports."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from deploy import cli
from deploy.supervisor.template.identity import show_elsewhere, write_to
from shared.config import replace_environment
from tests.support.lanes import forked_server
from tests.support.paths import REPOSITORY
from tests.support.warm import up
from tests.support.warm.processes import PYTHONPATH


class ForkedUp:
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
            raise subprocess.TimeoutExpired("baton up", timeout or 0.0)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def can_fork(argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether this starts templates of warm processes, with folders of packages that are the tests' own, and a fork
    server is there that was forked itself: one that is started would import all of it first."""
    if environment.get("PYTHONPATH", "") != PYTHONPATH:  # a supervisor looks for packages, too
        return False
    return list(argv[1:3]) == ["-m", up.__name__] and forked_server.is_there()


def fork_up(argv: Sequence[str], environment: Mapping[str, str], output: Path, prepare: Callable[[], None]) -> ForkedUp:
    """`argv` as for a process of its own; `prepare` is called in the forked one."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_become, args=(list(argv), dict(environment), output, prepare), daemon=True)
    process.start()
    return ForkedUp(process)


def _become(argv: list[str], environment: dict[str, str], output: Path, prepare: Callable[[], None]) -> None:
    """What `exec` would do."""
    atexit._clear()
    os.setsid()
    prepare()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with output.open("ab") as said:
        write_to(os.dup(said.fileno()))
    os.chdir(REPOSITORY)
    replace_environment(environment)
    show_elsewhere(argv, environment)
    sys.argv[:] = [up.__file__, *argv[4:]]
    up.patch(Path(argv[3]))
    try:
        cli.main()
    finally:
        atexit._run_exitfuncs()
