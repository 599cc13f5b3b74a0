"""What a stack needs beside its services: bus, store, federation, keeper, and what other hosts fetch the model from."""

from __future__ import annotations

import sys
import time
from typing import Any

from deploy.supervisor.keeper import NAME as KEEPER
from deploy.supervisor.keeper import keeper_command
from deploy.supervisor.log_files import LogFolder
from deploy.supervisor.processes import ChildProcesses
from deploy.supervisor.servers.federation import NAME as FEDERATION
from deploy.supervisor.servers.federation import FederationServer
from deploy.supervisor.servers.model_server import NAME as MODEL_SERVER
from deploy.supervisor.servers.model_server import model_server
from deploy.supervisor.servers.nats import NAME as NATS
from deploy.supervisor.servers.nats import BusAccess
from deploy.supervisor.servers.redis import NAME as REDIS
from deploy.supervisor.servers.redis import StoreAccess
from deploy.supervisor.servers.server_process import ServerProcess
from deploy.supervisor.spec import StackSpec
from deploy.supervisor.state_file import LOCK, StackState

SERVERS = (NATS, REDIS, FEDERATION, KEEPER, MODEL_SERVER)


class StackServers:
    """Owns a stack's servers: started in order, ended in the opposite one, and started again where one dies."""

    def __init__(self, spec: StackSpec, children: ChildProcesses, logs: LogFolder) -> None:
        self._children, self._logs = children, logs
        self.access = BusAccess(spec)
        self.store = StoreAccess(spec)
        self.federation = FederationServer(spec)
        down = [sys.executable, "-m", "deploy.cli", "down", "--run-dir", str(spec.run_dir)]
        keep = keeper_command(spec.run_dir / LOCK, spec.orphan_timeout, down)
        self._keeper = ServerProcess(KEEPER, keep, None, children, logs)
        self._model_server = model_server(spec, children, logs)

    async def start(self, former: StackState | None) -> None:
        """Starts those that there are to be, or goes on with those of `former`. Raises OSError,
        NatsServerUnavailable, RedisServerUnavailable, ServerNotStarted."""
        for server in (self.access, self.store, self.federation):
            await server.start(self._children, self._logs, former)
        await self._keeper.start(time.monotonic())
        if self._model_server is not None:
            await self._model_server.start(time.monotonic())

    async def end(self) -> None:
        """Ends all."""
        await self._keeper.end()
        if self._model_server is not None:
            await self._model_server.end()
        for server in (self.federation, self.store, self.access):
            await server.end()

    def processes(self) -> list[ServerProcess]:
        """Those that run, or are to."""
        found = [each.process for each in (self.access.embedded, self.store.redis) if each is not None]
        others = (self.federation.process, self._model_server, self._keeper)
        return [*found, *(each for each in others if each is not None)]

    def record_exit(self, name: str, now: float) -> bool:
        """A process has ended: whether it was one of these, which starts again when due."""
        server = next((each for each in self.processes() if each.name == name), None)
        if server is not None:
            server.exited(now)
        return server is not None

    def restart_due(self, now: float) -> bool:
        """Starts again whose pause after a death is over; whether there was any."""
        started = [server for server in self.processes() if server.restart_if_due(now)]
        return bool(started)

    def problems(self) -> list[str]:
        """Who died so often that somebody should look."""
        return [f"{each.name} died {each.failures} times in a row" for each in self.processes() if each.failed]

    def recorded(self) -> dict[str, Any]:
        """The fields of a `StackState` that say where they are."""
        user, password = self.access.credentials("operator") or (None, None)
        nats, redis = self.access.embedded, self.store.redis
        return {
            "nats_url": self.access.urls,
            "nats_user": user,
            "nats_password": password,
            "nats_ca": self.access.authority,
            "nats_pid": nats.process.pid if nats else None,
            "nats_passwords": {str(user): password for user, password in nats.passwords.items()} if nats else {},
            "nats_port": nats.port if nats else None,
            "redis_pid": redis.process.pid if redis else None,
            "redis_password": redis.password if redis else None,
            "redis_port": redis.port if redis else None,
            "arenas": str(self.store.arenas) if self.store.arenas else None,
            "federation_port": self.federation.port,
        }
