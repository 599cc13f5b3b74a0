"""`python -m deploy.supervisor.template FD MODULE,… FLAGS… PADDING`: imports what the modules need, then forks
processes that run them.

One thread, no device, nothing of a model: what a fork takes over is code. The supervisor asks by the socket FD; this
process ends with it, and those that it has forked go on.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from runpy import run_module
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from deploy.supervisor.template.identity import NAME_MARK, ShownMemory, write_to
from deploy.supervisor.template.protocol import (
    MAX_MESSAGE_BYTES,
    ForkedExited,
    ForkProcess,
    ForkRefused,
    ProcessForked,
    TemplateWarmed,
    decode_request,
    encode,
)
from shared.child_watch import ChildWatch, leave_child_watch, reaped
from shared.config import look_up_settings, replace_environment
from shared.machine.file_pages import release_file_pages
from shared.machine.heap import keep_forks_apart
from shared.telemetry.logs import set_log_level

_PR_SET_PDEATHSIG = 1
_THREADS_GONE_TIMEOUT = 1.0


class Job(NamedTuple):
    """What a forked process is to run."""

    request: ForkProcess
    output: int
    """File descriptor."""


class ForkingTemplate:
    """Owns the processes that it has forked, as their parent: nobody else can wait for them."""

    def __init__(self, control: socket.socket) -> None:
        """Raises OSError where forked processes could not be given names of their own."""
        self._control = control
        self._shown = ShownMemory.own()

    def run(self) -> Job | None:
        """Returns in each forked process, with what that is to run; in the template itself None, once the supervisor is
        gone."""
        with ChildWatch(self._control) as watch:
            while True:
                readable = watch.wait()
                for pid, code in reaped():
                    self._send(ForkedExited(pid, code))
                if not readable:
                    continue
                data, outputs, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 1)
                if not data:
                    return None
                job = Job(decode_request(data), outputs[0])
                if self._forked(job):
                    return job
                os.close(job.output)

    def _forked(self, job: Job) -> bool:
        """Whether this is the new process."""
        if (threads := _threads()) > 1:
            self._send(ForkRefused(f"the template has {threads} threads"))
            return False
        if os.fork():
            return False
        leave_child_watch()
        os.setsid()
        request = job.request
        try:
            self._shown.rename(request.environment[NAME_MARK])
            self._shown.show([sys.executable, "-m", request.module, *request.argv])
            self._send(ProcessForked(os.getpid()))  # and whoever heard of it may end it
        except OSError:
            os._exit(1)
        return True

    def _send(self, message: msgspec.Struct) -> None:
        self._control.send(encode(message))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def run_job(job: Job, program: ModuleType | None) -> None:
    """Becomes the program of the job; ends as that does. `program`: its `__main__`, where that is imported."""
    write_to(job.output)
    replace_environment(job.request.environment)
    sys.argv[1:] = job.request.argv
    try:
        if program is None or program.__file__ is None:
            run_module(job.request.module, run_name="__main__", alter_sys=True)
        else:
            sys.argv[0], sys.modules["__main__"] = program.__file__, program
            program.main()
    except BaseException:
        # What is excluded from collection is never freed, and Triton's nanobind would list it as leaked: 40 lines
        # behind the reason why this process ends.
        gc.unfreeze()
        raise


def _warm(modules: Sequence[str], flags: Sequence[str]) -> dict[str, ModuleType]:
    """Imports what the modules need: one that has a `preload` says so by these flags. Returns the programs that are
    imported by then, by module: each has a `main`. Raises what imports raise."""
    programs: dict[str, ModuleType] = {}
    for name in ("uvloop", "encodings.idna", "encodings.unicode_escape"):  # every service does, once it runs
        with suppress(ImportError):
            import_module(name)
    for module in modules:
        if find_spec(f"{module}.preload") is not None:
            preload: Any = import_module(f"{module}.preload")
            preload.preload(flags)
        else:
            import_module(f"{module}.__main__")
        if (program := sys.modules.get(f"{module}.__main__")) is not None:
            programs[module] = program
    look_up_settings()
    set_log_level("info")  # what most have; another one is set by the process that has it
    deadline = time.monotonic() + _THREADS_GONE_TIMEOUT
    while _threads() > 1 and time.monotonic() < deadline:  # one that was joined is gone a moment later
        time.sleep(0.01)
    gc.collect()
    gc.freeze()  # what is there now stays shared: a collection would write to it
    keep_forks_apart()
    release_file_pages()  # of PyTorch's 60 MB of code that importing ran it needs none again
    return programs


def main() -> None:
    """Runs the template, and in each forked process the program."""
    began = time.perf_counter()
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):  # while importing it does not listen
        raise SystemExit(1)
    control = socket.socket(fileno=int(sys.argv[1]))
    job, programs = None, dict[str, ModuleType]()
    with suppress(ConnectionError), control:
        try:
            template = ForkingTemplate(control)
            programs = _warm(sys.argv[2].split(","), sys.argv[3:-1])
        except Exception as error:  # the process itself will say what is wrong, and where
            control.send(encode(ForkRefused(f"{type(error).__name__}: {error}")))
            return
        control.send(encode(TemplateWarmed(time.perf_counter() - began)))
        job = template.run()
    if job is not None:
        run_job(job, programs.get(job.request.module))


if __name__ == "__main__":
    main()
