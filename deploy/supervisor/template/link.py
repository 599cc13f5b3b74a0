"""A template as the supervisor sees it: a process that forks others, and says how they ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import assert_never

from deploy.supervisor.template.blanks import BlankProcess, next_blank
from deploy.supervisor.template.identity import MAX_NAME_BYTES, NAME_MARK, padded
from deploy.supervisor.template.protocol import (
    MAX_MESSAGE_BYTES,
    ForkedExited,
    ForkProcess,
    ForkRefused,
    ProcessForked,
    TemplateWarmed,
    decode_answer,
    encode,
)
from shared.private_files import private_opener

log = logging.getLogger(__name__)

TEMPLATE = "template"
"""Forks what needs PyTorch: workers and encoders."""
SERVICE_TEMPLATE = "service-template"
"""Forks all that needs no PyTorch, and does not carry it about."""
FORK_TIMEOUT = 0.5
"""Seconds. A fork takes 10 ms, 100 on a machine that is overloaded. Nothing else is looked after meanwhile, so then the
process is started in the usual way; what the template forks later all the same is ended at once."""
SILENCE_TIMEOUT = 30.0
"""Seconds that a template may owe the answer to a request that was not waited for; then it is given up."""
_LOOK_EVERY = 0.1
REPORT_TIMEOUT = 1.0
"""Seconds from the end of a forked process to the template's word on how it ended."""
WARM_TIMEOUT = 60.0
"""Seconds that processes wait for the imports; then they import themselves."""
RESTART_PAUSE = 30.0
"""Seconds between two starts of a template."""
MAX_STARTS = 5
"""In a row without becoming warm; then it is done without."""
_ARGV_ROOM = 512
"""Bytes by which a process's command line may be longer than that of the template."""


class TemplateProcess:
    """Owns the template's process, while there is one."""

    def __init__(self, name: str, modules: Collection[str], notify: Callable[[], None]) -> None:
        """`modules`: of the programs that it forks. `notify`: called when it has said something."""
        self.name = name
        self._modules = frozenset(modules)
        self._notify = notify
        self._starts = 0
        self._process: subprocess.Popen[bytes] | BlankProcess | None = None
        self._control: socket.socket | None = None
        self._began = 0.0
        self._warm = False
        self._refused = False
        self._exits: dict[int, int] = {}
        """Status by pid, until it is asked for."""
        self._forked: int | None = None
        """The pid of the request under way, once it runs."""
        self._overdue_since: float | None = None
        """Since when it owes the answer to a request that is not waited for any more."""
        self._unwanted = set[int]()
        """Pids of what it forked too late, until it tells their end."""

    @property
    def is_settled(self) -> bool:
        """Whether nobody needs to wait for it: it is warm, or has ended, or takes too long."""
        return self._warm or self._control is None or time.monotonic() - self._began > WARM_TIMEOUT

    @property
    def may_start(self) -> bool:
        """Whether there is none, and another one could do better."""
        if self._control is not None or self._refused or self._starts >= MAX_STARTS:
            return False
        return self._starts == 0 or time.monotonic() - self._began > RESTART_PAUSE

    @property
    def is_connected(self) -> bool:
        """Whether it says how its processes end."""
        return self._control is not None

    def start(self, flags: Sequence[str], environment: Mapping[str, str], log_file: Path) -> None:
        """Starts it, in a session of its own, with the environment of those that it forks; `flags` are those of
        one of them. Where that cannot be, there is none. Needs a running event loop."""
        self._starts += 1
        self._began, self._warm = time.monotonic(), False
        self._overdue_since = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        padding = " " * _ARGV_ROOM
        modules = ",".join(sorted(self._modules))
        argv = [sys.executable, "-m", __package__, str(theirs.fileno()), modules, *flags, padding]
        with ours, theirs, contextlib.suppress(OSError):
            with open(log_file, "ab", opener=private_opener) as output:
                whole = {**environment, "OPENBLAS_NUM_THREADS": "1", NAME_MARK: padded(self.name)}
                self._process = launched(argv, whole, output.fileno(), theirs.fileno())
            self._control = ours.dup()
            self._control.setblocking(False)
            asyncio.get_running_loop().add_reader(self._control, self._readable)
            log.info("template started", extra={"child": self.name, "pid": self._process.pid})

    def fork(self, argv: Sequence[str], environment: Mapping[str, str], output: int) -> ForkedProcess | None:
        """A process that runs `argv`, in a session of its own, that writes to the descriptor `output`; None where it
        has to be started in the usual way. Waits for FORK_TIMEOUT at most."""
        if not self._warm or self._control is None or argv[0] != sys.executable or argv[1] != "-m":
            return None
        if argv[2] not in self._modules or len(environment[NAME_MARK].encode()) > MAX_NAME_BYTES:
            return None
        self.read()
        if self._overdue_since is not None:
            if time.monotonic() - self._overdue_since > SILENCE_TIMEOUT:
                self._give_up(f"no answer for {SILENCE_TIMEOUT:g} s")
            return None
        request = encode(ForkProcess(argv[2], tuple(argv[3:]), dict(environment)))
        self._forked, deadline = None, time.monotonic() + FORK_TIMEOUT
        try:
            socket.send_fds(self._control, [request], [output])
        except OSError as error:  # among others too long a message
            log.warning("not forked", extra={"error": str(error)})
            return None
        while self._awaits and time.monotonic() < deadline:
            answered, _, _ = select.select([self._control], [], [], _LOOK_EVERY)
            self.read()
            if not answered and self._stands_still:
                self._give_up("it stands still")
        if self._awaits:
            log.warning("not forked", extra={"error": "no answer of the template yet"})
            self._overdue_since = time.monotonic()
        return None if self._forked is None else ForkedProcess(self, self._forked)

    @property
    def _awaits(self) -> bool:
        """Whether the answer to the request under way may come yet."""
        return self._control is not None and self._forked is None and self._warm

    def _give_up(self, why: str) -> None:
        log.warning("template given up", extra={"child": self.name, "error": why})
        self.close()

    def read(self) -> None:
        """Takes in all that it has said."""
        while self._control is not None:
            try:
                data = self._control.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                log.warning("template ended", extra={"child": self.name})
                self.close()
                return
            match decode_answer(data):
                case TemplateWarmed(seconds):
                    self._warm, self._starts = True, 1
                    log.info("template warm", extra={"child": self.name, "seconds": round(seconds, 3)})
                case ProcessForked(pid):
                    self._take(pid)
                case ForkedExited(pid, status):
                    if pid not in self._unwanted:
                        self._exits[pid] = status
                    self._unwanted.discard(pid)
                case ForkRefused(reason):
                    self._warm, self._refused = False, True
                    log.warning("processes are not forked", extra={"child": self.name, "reason": reason})
                case other:
                    assert_never(other)

    def _take(self, pid: int) -> None:
        """A process that was forked too late runs elsewhere by now. It has the template for its parent, which waits for
        it: its pid is no other's before its end is told."""
        if self._overdue_since is None:
            self._forked = pid
            return
        self._overdue_since = None
        self._unwanted.add(pid)
        log.warning("forked too late", extra={"child": self.name, "pid": pid})
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def status_of(self, pid: int) -> int | None:
        """How a forked process ended, once; None where that was not said."""
        self.read()
        return self._exits.pop(pid, None)

    def close(self) -> None:
        """Ends it, if it is there. What it has forked goes on."""
        if self._control is not None:
            with contextlib.suppress(RuntimeError):  # no loop runs any more
                asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
            self._unwanted.clear()
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
        self._warm = False

    @property
    def _stands_still(self) -> bool:
        """Whether it was stopped, by a signal or a debugger; where the kernel does not say so it was not."""
        with contextlib.suppress(OSError):
            if self._process is not None:
                status = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
                return status[0] in "Tt"
        return False

    def _readable(self) -> None:
        self.read()
        self._notify()


def launched(
    argv: Sequence[str], environment: Mapping[str, str], output: int, control: int
) -> subprocess.Popen[bytes] | BlankProcess:
    """The template's process, which has the descriptor `control` and writes to `output`. Raises OSError."""
    blank = next_blank()
    if blank is not None and blank.become(argv, environment, output, control):
        return blank
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        pass_fds=(control,),
        start_new_session=True,
    )


class ForkedProcess:
    """A process that the template has forked. The template is its parent, and says how it ended."""

    def __init__(self, template: TemplateProcess, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """As subprocess gives it, once it has ended; None where nobody knows."""
        self._template = template
        self._ended = False
        self._missed_at: float | None = None

    def has_ended(self, lives: bool) -> bool:
        """Whether it has. `lives`: whether the kernel has such a process; how it ended is known a moment later."""
        if not self._ended:
            self.returncode = self._template.status_of(self.pid)
            self._ended = self.returncode is not None or (not lives and self._is_given_up())
        return self._ended

    def _is_given_up(self) -> bool:
        now = time.monotonic()
        if self._missed_at is None:
            self._missed_at = now
        return not self._template.is_connected or now - self._missed_at > REPORT_TIMEOUT
