"""What the KV store lies on: its directory in shared memory, and a redis-server where one is asked for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import assert_never

from deploy.supervisor.arenas import arenas, remove_leftovers
from deploy.supervisor.log_files import LogFolder
from deploy.supervisor.processes import ChildProcesses
from deploy.supervisor.redis_server import RedisProcess
from deploy.supervisor.spec import EmbeddedRedis, OutsideRedis, StackSpec


class StoreAccess:
    """Owns both, in a stack that has a store; nothing in another."""

    def __init__(self, spec: StackSpec) -> None:
        self._spec = spec
        self.arenas: Path | None = None
        self.redis: RedisProcess | None = None

    @property
    def redis_url(self) -> str | None:
        match self._spec.store.redis:
            case OutsideRedis(url=url):
                return url
            case EmbeddedRedis():
                return self.redis.url if self.redis is not None else None
            case None:
                return None
            case other:
                assert_never(other)

    @contextlib.contextmanager
    def directory(self) -> Iterator[None]:
        """Longer there than any process of the stack. Raises OSError."""
        if not self._spec.counts.kvstore:
            remove_leftovers(self._spec.run_dir)
            yield
            return
        with arenas(self._spec.run_dir) as self.arenas:
            yield

    @contextlib.asynccontextmanager
    async def server(self, children: ChildProcesses, logs: LogFolder) -> AsyncIterator[None]:
        """The redis-server while the context is open. Raises NoRedisServer."""
        asked = self._spec.store.redis
        if not self._spec.counts.kvstore or not isinstance(asked, EmbeddedRedis):
            yield
            return
        self.redis = RedisProcess(self._spec.run_dir, asked.memory, children, logs)
        await self.redis.start(time.monotonic())
        try:
            yield
        finally:
            await self.redis.process.end()
