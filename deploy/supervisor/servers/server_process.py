"""A program that is no actor, such as a server: started or adopted, watched, and restarted when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Sequence

from deploy.supervisor.core.members import RestartPolicy
from deploy.supervisor.log_files import LogFolder
from deploy.supervisor.processes import ChildProcesses

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
LISTEN_DEADLINE = 10.0
POLL_INTERVAL = 0.01
END_DEADLINE = 2.0
"""Seconds to end before it is killed."""


class ServerNotStarted(Exception):
    """The server never listened; the text shows the end of its log."""


def free_port(host: str = HOST) -> int:
    """A TCP port of the address that is free now; another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """Owns when the program runs. The process belongs to `ChildProcesses`."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        address: tuple[str, int] | None,
        children: ChildProcesses,
        logs: LogFolder,
    ) -> None:
        """`address`: where it listens once it is up; None where it does not listen."""
        self.name = name
        self.pid: int | None = None
        self._argv = list(argv)
        self._address = address
        self._children = children
        self._logs = logs
        self._policy = RestartPolicy()
        self._started_at = 0.0
        self.failures = 0
        """Deaths in a row."""
        self._due: float | None = None

    @property
    def failed(self) -> bool:
        """Whether it died so often in a row that somebody should look."""
        return self.failures >= self._policy.failures_until_failed

    @property
    def is_adopted(self) -> bool:
        """Whether it runs already, before `start`: a former supervisor started it."""
        return self.pid is None and self._children.pid(self.name) is not None

    async def start(self, now: float) -> None:
        """Returns once it listens; one that was adopted is left as it is. Raises ServerNotStarted, or OSError where it
        cannot be run."""
        self.pid = self._children.pid(self.name)
        if self.pid is None:
            self._spawn(now)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LISTEN_DEADLINE):
                while not _listens(self._address):
                    if self._children.has_ended(self.name):
                        break
                    await asyncio.sleep(POLL_INTERVAL)
                else:
                    return
        raise ServerNotStarted(f"{self.name} did not start:\n" + "\n".join(self._logs.last_lines(self.name)))

    async def end(self) -> None:
        """Sends SIGTERM, and waits for a while."""
        self._children.signal(self.name, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_DEADLINE):
                while not self._children.has_ended(self.name):
                    await asyncio.sleep(POLL_INTERVAL)

    def kill_if_older(self, seconds: float, now: float) -> None:
        """Kills a program that runs for so long: it does not what it is there for. It is started again as after any
        death."""
        if self.pid is not None and now - self._started_at > seconds:
            log.error("server hangs", extra={"child": self.name, "pid": self.pid})
            self._children.signal(self.name, signal.SIGKILL)

    def exited(self, now: float) -> None:
        """It died: it starts again when due."""
        if now - self._started_at >= self._policy.healthy_after:
            self.failures = 0
        self.failures += 1
        self._due = now + self._policy.pause(self.failures)
        self.pid = None

    def restart_if_due(self, now: float) -> bool:
        """Starts the program again once its pause after a death is over; whether it was started."""
        if self._due is None or now < self._due:
            return False
        self._spawn(now)
        return True

    def _spawn(self, now: float) -> None:
        self.pid = self._children.start(self.name, self._argv, self._logs.of(self.name), {})
        self._started_at, self._due = now, None
        log.info("started", extra={"child": self.name, "pid": self.pid})


def _listens(address: tuple[str, int] | None) -> bool:
    if address is None:
        return True
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=0.2):
        return True
    return False
