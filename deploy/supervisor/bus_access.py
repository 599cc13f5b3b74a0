"""How the supervisor, its children and the operator reach the bus: the embedded server or one outside."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from msgspec.structs import replace

from deploy.supervisor.log_files import LogFolder
from deploy.supervisor.nats_server import EmbeddedNats
from deploy.supervisor.permissions import User, passwords_of
from deploy.supervisor.processes import ChildProcesses
from deploy.supervisor.spec import HostsSpec, StackSpec
from shared.bus import Bus
from shared.bus.nats_bus import NatsOptions, connect


class BusAccess:
    """Owns the embedded server, where there is one."""

    def __init__(self, spec: StackSpec) -> None:
        self._spec = spec
        self.embedded: EmbeddedNats | None = None

    @property
    def urls(self) -> tuple[str, ...]:
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

    def environment(self, user: User) -> dict[str, str]:
        """Never flags: a process list shows those."""
        environment = {"BATON_NATS_URL": ",".join(self.urls)}
        if (credentials := self.credentials(user)) is not None:
            environment["BATON_NATS_USER"], environment["BATON_NATS_PASSWORD"] = credentials
        return environment

    @contextlib.asynccontextmanager
    async def server(self, children: ChildProcesses, logs: LogFolder) -> AsyncIterator[None]:
        """The embedded server while the context is open; nothing where there is one outside."""
        if self._spec.outside_bus is not None or self._joins is not None:
            yield
            return
        self.embedded = EmbeddedNats(self._spec.run_dir, self._spec.namespace, children, logs, self._spec.hosts)
        await self.embedded.start(time.monotonic())
        try:
            yield
        finally:
            await self.embedded.process.end()

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Bus]:
        """The supervisor's own. Raises BusError."""
        user, password = self.credentials("supervisor") or (None, None)
        options = NatsOptions(
            servers=self.urls, namespace=self._spec.namespace, name="supervisor", user=user, password=password
        )
        if self._joins is not None:  # whose first host may be started after this one
            options = replace(options, connect_timeout=self._spec.start_timeout)
        bus = await connect(options)
        try:
            yield bus
        finally:
            await bus.close()
