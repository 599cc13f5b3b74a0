"""Processes of this machine: started so that they outlive the supervisor, and found again by the next one.

Each has the run directory and its name in its environment, so that one that no file knows of is found, too. A pid is
only used together with the process's start time: a pid alone may by now be somebody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, assert_never

import psutil

from deploy.supervisor.core.plan import ProcessSpec
from deploy.supervisor.template.identity import NAME_MARK, shown_name
from deploy.supervisor.template.link import ForkedProcess, TemplateProcess
from shared.ids import InstanceId, NodeId
from shared.private_files import private_opener

RUN_DIR_MARK = "BATON_PROCESS_OF"
KILL_DEADLINE = 10.0
KILL_POLL = 0.01


class ProcessIdentity(NamedTuple):
    """A pid, and which of all the processes that ever had it."""

    pid: int
    started: float
    """Clock ticks since boot on Linux, which a change of the clock does not move; Unix seconds elsewhere."""

    @property
    def lives(self) -> bool:
        """Whether this process is still there; one that waits to be reaped is not."""
        return start_time(self.pid) == self.started


def start_time(pid: int) -> float | None:
    """When the process started, as `ProcessIdentity.started` has it; None where there is no such process."""
    if sys.platform != "linux":
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
        return None
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # often: costs half of what text does
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in b"ZX" else float(fields[19])


def marked_processes(run_dir: Path) -> Iterator[tuple[str, ProcessIdentity]]:
    """Name and identity of each process that was started for a run directory and lives; not of their children."""
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(pid) != pid:
                continue
            environment, started = psutil.Process(pid).environ(), start_time(pid)
            if environment.get(RUN_DIR_MARK) == str(run_dir) and started is not None:
                yield shown_name(environment[NAME_MARK]), ProcessIdentity(pid, started)


class Exit(NamedTuple):
    """A process that has ended."""

    name: str
    status: int | None
    """As subprocess gives it: negative for a signal; None where another supervisor had started it."""


class _Child(NamedTuple):
    identity: ProcessIdentity
    started: subprocess.Popen[bytes] | ForkedProcess | None
    """None: a former supervisor's, which cannot be waited for."""

    def has_ended(self) -> bool:
        match self.started:
            case None:
                return not self.identity.lives
            case ForkedProcess():
                return self.started.has_ended(self.identity.lives)
            case subprocess.Popen():
                return self.started.poll() is not None
            case _:
                assert_never(self.started)


class ChildProcesses:
    """Owns every process of the stack on this machine, by name. Not thread-safe; no threads are needed."""

    def __init__(self, environment: Mapping[str, str], run_dir: Path) -> None:
        self._environment = {**environment, RUN_DIR_MARK: str(run_dir)}
        self._children: dict[str, _Child] = {}

    def start(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        template: TemplateProcess | None = None,
    ) -> int:
        """Starts a process in a session of its own, so that neither Ctrl-C in the terminal nor the supervisor's end
        reaches it; its pid. `template` forks it where it can. What it says is lost where its log cannot be written.

        Raises OSError.
        """
        whole = {**self._environment, **environment, NAME_MARK: name}
        with _opened(log) as output:
            child: subprocess.Popen[bytes] | ForkedProcess | None = None
            if template is not None:
                child = template.fork(argv, whole, output)
            if child is None:
                child = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=whole,
                    start_new_session=True,
                )
        # Not reaped before `poll`, so its entry is there; that of one that has died already has no time.
        self._children[name] = _Child(ProcessIdentity(child.pid, start_time(child.pid) or 0.0), child)
        return child.pid

    def start_template(
        self, template: TemplateProcess, flags: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        """Starts what forks later processes. It is none of `identities`: the next supervisor has one of its own."""
        template.start(flags, {**self._environment, **environment}, log)

    def adopt(self, name: str, identity: ProcessIdentity) -> None:
        """Takes over a process of a former supervisor, alive or not."""
        self._children[name] = _Child(identity, None)

    def identities(self) -> dict[str, ProcessIdentity]:
        """All processes that are there, or whose end was not yet reported."""
        return {name: child.identity for name, child in self._children.items()}

    def exited(self) -> list[Exit]:
        """Those that ended since the last call. What a process leaves of its group is killed with it."""
        ended = [name for name, child in self._children.items() if child.has_ended()]
        found = []
        for name in ended:
            child = self._children.pop(name)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.identity.pid, signal.SIGKILL)
            found.append(Exit(name, child.started.returncode if child.started is not None else None))
        return found

    def pid(self, name: str) -> int | None:
        """Of the process of this name; None where none runs."""
        return None if self.has_ended(name) else self._children[name].identity.pid

    def has_ended(self, name: str) -> bool:
        """Whether no process of this name is running."""
        child = self._children.get(name)
        return child is None or child.has_ended()

    def signal(self, name: str, number: signal.Signals) -> None:
        """To the process alone if it may clean up, to its whole group if it is killed."""
        child = self._children.get(name)
        if child is None or child.has_ended():
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(child.identity.pid, number)
            else:
                os.kill(child.identity.pid, number)

    def kill_all(self) -> None:
        """The last resort: kills what is left and waits for it, KILL_DEADLINE seconds at most."""
        for name in self._children:
            self.signal(name, signal.SIGKILL)
        deadline = time.monotonic() + KILL_DEADLINE
        while not all(child.has_ended() for child in self._children.values()) and time.monotonic() < deadline:
            time.sleep(KILL_POLL)
        self.exited()


@contextlib.contextmanager
def handled_signals(end: Callable[[], None], child_ended: Callable[[], None]) -> Iterator[None]:
    """Within the context the event loop calls these: `end` for what asks this process to end, in place of a
    KeyboardInterrupt wherever it is, which would leave behind a process that is started and not yet noted."""
    loop = asyncio.get_running_loop()
    called = {signal.SIGCHLD: child_ended, signal.SIGINT: end, signal.SIGTERM: end, signal.SIGHUP: end}
    for number, handler in called.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in called:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _opened(log: Path) -> Iterator[int]:
    """The log to append to; nowhere where it cannot be had, as on a full disk."""
    try:
        fd = private_opener(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    except OSError:
        fd = os.open(os.devnull, os.O_WRONLY)
    try:
        yield fd
    finally:
        os.close(fd)


# Processes of other machines: whoever runs them says what becomes of them.


class TransferSite(NamedTuple):
    """Where a KV store sends blocks from, and the files there by which stores know each other."""

    address: str
    """Where other nodes' stores reach it."""
    certificate: Path
    key: Path
    authority: Path


class RemoteSite(NamedTuple):
    """What is known of the place where a process is to run, once it has one."""

    node: NodeId | None = None
    """The name of its engine's KV store; None without one."""
    arenas: Path | None = None
    """That store's directory there."""
    transfer: TransferSite | None = None
    """Of that store; None where stores exchange no blocks."""
    rendezvous: str | None = None
    """Where the ranks of its engine meet, at this start."""
    device: int | None = None
    """Index of the device among those that its place has; None for what is no worker."""


class RemoteCommand(NamedTuple):
    """A program to run on another host."""

    arguments: tuple[str, ...]
    """Of that machine's Python."""
    environment: Mapping[str, str]
    """Beside that machine's own."""


CommandAt = Callable[[RemoteSite], RemoteCommand]


class RemoteEvents(NamedTuple):
    """Where it is said what became of processes."""

    started: Callable[[InstanceId, int], None]
    """A process runs; the pid is that of its machine."""
    ended: Callable[[InstanceId, int], None]
    """A process has ended, with this status (as subprocess gives it), or could not be started."""


class RemoteProcesses(Protocol):
    """Runs processes on other machines. Decides nothing: what ended is started again where the supervisor says so."""

    def takes(self, process: ProcessSpec) -> bool:
        """Whether it runs this process; others run on this machine."""

    def attach(self, events: RemoteEvents, log_of: Callable[[str], Path]) -> None:
        """Whom it reports to, and the file that it appends each process's words to. Once, before anything starts."""

    async def adopt(self, processes: Iterable[ProcessSpec]) -> Mapping[InstanceId, int]:
        """Finds what a former supervisor left of these, which it follows from `run` on: the pids of those that live.
        All else that this stack has elsewhere is ended."""

    def start(self, process: ProcessSpec, command: CommandAt, *, new_rendezvous: bool) -> None:
        """Starts a process as soon as there is a place for it. `new_rendezvous`: it is the first rank of its engine's
        start."""

    def signal(self, instance: InstanceId, number: signal.Signals) -> None:
        """To the process alone if it may clean up, to its whole group if it is killed."""

    def keep(self, instances: Iterable[InstanceId]) -> None:
        """Gives up the places of all processes but these."""

    def problems(self) -> list[str]:
        """What cannot be done at present, for people to read."""

    async def run(self) -> None:
        """Until cancelled. Raises what was a bug."""

    async def end(self) -> None:
        """Ends whatever still runs, at once, and gives up all places."""
