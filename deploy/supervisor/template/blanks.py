"""Processes that a supervisor forks of itself before it does anything: templates are made of them.

What the supervisor has imported by then is a third of what a template needs. A template that was forked has it at once,
and it lies in memory once for the supervisor, its templates and all that these fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from runpy import run_module
from typing import NamedTuple, NoReturn

from deploy.supervisor.template.identity import show_elsewhere, write_to
from deploy.supervisor.template.protocol import MAX_MESSAGE_BYTES, ForkProcess, decode_request, encode
from shared.config import replace_environment
from shared.machine.heap import keep_forks_apart

log = logging.getLogger(__name__)

ANSWER_TIMEOUT = 1.0
"""Seconds. A blank process answers within a millisecond; one that does not is done without."""
_PR_SET_PDEATHSIG = 1
_waiting: list[BlankProcess] = []
"""This process's, until they are used."""


class BlankProcess(NamedTuple):
    """A copy of this process that waits to be told which program it is."""

    pid: int
    channel: socket.socket

    def become(self, argv: Sequence[str], environment: Mapping[str, str], output: int, control: int) -> bool:
        """Has it run `argv`, in a session of its own, with the descriptor `control` and its output in `output`. False
        where it cannot, as on a kernel that does not let a process show another command line: it has ended then."""
        module, *flags = argv[2:]
        request = encode(ForkProcess(module, (argv[0], *flags), dict(environment)))
        with self.channel, contextlib.suppress(OSError):  # among others too long a message
            socket.send_fds(self.channel, [request], [control, output])
            if select.select([self.channel], [], [], ANSWER_TIMEOUT)[0] and self.channel.recv(1):
                return True
        log.info("a template is executed, as none can be forked of the supervisor")
        self.send_signal(signal.SIGKILL)
        self.wait()
        return False

    def send_signal(self, number: int) -> None:
        """To it, as long as it has not been waited for."""
        os.kill(self.pid, number)

    def wait(self) -> int:
        """How it ended, once it has."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextlib.contextmanager
def blank_processes(count: int) -> Iterator[None]:
    """Has so many ready within the context, for `next_blank`; none where forking is not safe, as other threads run.

    In the forked processes the context raises SystemExit once their program has ended, so nothing may be open around it
    that is not to be closed there."""
    if count and len(os.listdir("/proc/self/task")) == 1:
        gc.collect()
        gc.freeze()  # what is there now stays shared: a collection would write to it
        keep_forks_apart()
        with contextlib.suppress(OSError):  # no more processes to be had: templates may be, a moment later
            for _ in range(count):
                _waiting.append(_forked())
    try:
        yield
    finally:
        while (blank := next_blank()) is not None:
            blank.channel.close()
            blank.wait()


def next_blank() -> BlankProcess | None:
    """One that has not been used, if there is any."""
    return _waiting.pop() if _waiting else None


def _forked() -> BlankProcess:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # what cannot be written is lost, as later on
            output.flush()
    parent = os.getpid()
    if pid := os.fork():
        theirs.close()
        return BlankProcess(pid, ours)
    for blank in (*_waiting, BlankProcess(0, ours)):
        blank.channel.close()
    _waiting.clear()
    try:
        _run_job(theirs, parent)
    except SystemExit:
        raise
    except BaseException:  # not to be taken for one of the supervisor's, in whose frames this runs
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None


def _run_job(channel: socket.socket, parent: int) -> NoReturn:
    """What `exec` would do, for a process that is there already."""
    os.setsid()
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) or os.getppid() != parent:
        os._exit(1)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != channel.fileno():
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(descriptor)
    data, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 2)
    if not data:
        os._exit(0)
    request = decode_request(data)
    control, output = descriptors
    write_to(output)
    replace_environment(request.environment)
    executable, *flags = request.argv
    sys.argv[1:] = [str(control), *flags[1:]]
    show_elsewhere([executable, "-m", request.module, *sys.argv[1:]], request.environment)
    channel.send(b"1")
    channel.close()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.excepthook = sys.__excepthook__
    run_module(request.module, run_name="__main__", alter_sys=True)
    raise SystemExit(0)
