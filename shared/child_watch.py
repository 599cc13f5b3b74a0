"""Waiting for a socket and for children at once, in a process of one thread that forks."""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Iterator
from typing import Self


class ChildWatch:
    """Wakes when a socket can be read or a child has ended. One per process: it owns the handler of SIGCHLD."""

    def __init__(self, control: socket.socket) -> None:
        """`control`: the socket that is waited for; it stays the caller's."""
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._control = self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a signal that is ignored would not write to the pipe
        return self

    def __exit__(self, *_: object) -> None:
        leave_child_watch()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def wait(self) -> bool:
        """Blocks until one of the two has happened. True where the socket can be read; `reaped` says who has ended."""
        ready = {key.fileobj for key, _ in self._selector.select()}
        if self._wake in ready:
            self._wake.recv(4096)
        return self._control.fileobj in ready


def reaped() -> Iterator[tuple[int, int]]:
    """(process id, exit code, negative for a signal) of every child that has ended by now, each told once."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def leave_child_watch() -> None:
    """Signals as in a new process: for a forked child, whose parent goes on watching."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
