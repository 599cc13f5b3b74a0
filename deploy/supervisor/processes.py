"""Processes of this machine: started so that they cannot outlive the supervisor, watched without threads.

On Linux the kernel kills a child when its parent dies (PR_SET_PDEATHSIG), in whatever state it is. Elsewhere a service
notices by the end of its `--supervisor-fd` pipe, once its event loop runs; foreign programs are wrapped by `tether`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PR_SET_PDEATHSIG = 1
KERNEL_ENDS_CHILDREN = sys.platform == "linux"


class Exit(NamedTuple):
    """A process that has ended, and its status as subprocess gives it: negative for a signal."""

    name: str
    status: int


class ChildProcesses:
    """Owns every process that the supervisor started, by name. Not thread-safe; no threads are needed."""

    def __init__(self, environment: Mapping[str, str], *, kernel_ends_children: bool = KERNEL_ENDS_CHILDREN) -> None:
        self._environment = dict(environment)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._pipe_read, self._pipe_write = os.pipe()
        self._before_exec = _die_with(os.getpid()) if kernel_ends_children else None

    @property
    def pipe(self) -> int:
        """The file descriptor, in every child, whose end of file means that the supervisor is gone."""
        return self._pipe_read

    def start(self, name: str, argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
        """Starts a process in a session of its own, so that Ctrl-C in the terminal does not reach it; its pid.

        Raises OSError.
        """
        with log.open("ab") as output:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self._environment, **environment},
                pass_fds=(self._pipe_read,),
                start_new_session=True,
                preexec_fn=self._before_exec,
            )
        self._children[name] = child
        return child.pid

    def exited(self) -> list[Exit]:
        """Children that ended since the last call. Processes that they left in their group are killed."""
        ended = [Exit(name, status) for name, child in self._children.items() if (status := child.poll()) is not None]
        for name, _ in ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._children.pop(name).pid, signal.SIGKILL)
        return ended

    def has_ended(self, name: str) -> bool:
        """Whether no process of this name is running."""
        child = self._children.get(name)
        return child is None or child.poll() is not None

    def signal(self, name: str, number: signal.Signals) -> None:
        """To the process alone if it may clean up, to its whole group if it is killed."""
        child = self._children.get(name)
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(child.pid, number)
            else:
                child.send_signal(number)

    def kill_all(self) -> None:
        """The last resort: kills what is left and waits for it."""
        for name, child in list(self._children.items()):
            self.signal(name, signal.SIGKILL)
            child.wait()
        self.exited()

    def close(self) -> None:
        """Closes the pipe, which ends children that watch it."""
        os.close(self._pipe_write)
        os.close(self._pipe_read)


def _die_with(parent: int) -> Callable[[], None]:
    """Runs in the child between fork and exec. The library is loaded before the fork."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def before_exec() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before prctl
            os._exit(1)

    return before_exec
