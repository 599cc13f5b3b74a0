"""Carries out what the fleet orders: starts, signals and announces. Answers with what came of a start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

from deploy.supervisor.bus_access import BusAccess
from deploy.supervisor.core.events import Announce, Exited, Kill, Spawned, Start, Terminate
from deploy.supervisor.foreign_server import HOST, free_port
from deploy.supervisor.launch import Launch, Whereabouts, secret_settings
from deploy.supervisor.log_files import LogFolder
from deploy.supervisor.network import network_environment
from deploy.supervisor.processes import ChildProcesses
from deploy.supervisor.spec import StackSpec
from deploy.supervisor.store_access import StoreAccess
from shared import topics
from shared.bus import Bus, BusError
from shared.ids import EngineId
from shared.messages.lifecycle import Lifecycle

log = logging.getLogger(__name__)

NOT_EXECUTABLE = 127
ANNOUNCEMENTS_LIMIT = 1_000
"""Waiting to be published; above it the others learn of a death by the silence after it."""


class Orders:
    """Owns where the ranks of each engine meet, and what is still to be announced."""

    def __init__(
        self,
        spec: StackSpec,
        launch: Launch,
        access: BusAccess,
        store: StoreAccess,
        children: ChildProcesses,
        logs: LogFolder,
    ) -> None:
        self._spec = spec
        self._launch = launch
        self._access = access
        self._store = store
        self._children = children
        self._logs = logs
        self.rendezvous: dict[EngineId, str] = {}
        """Made here on the first host; on others it is what that one says."""
        self._network = network_environment(spec.hosts)
        self._to_announce: asyncio.Queue[Lifecycle] = asyncio.Queue(ANNOUNCEMENTS_LIMIT)

    def carry_out(self, order: Start | Terminate | Kill | Announce, gateway_port: int) -> Spawned | Exited | None:
        match order:
            case Start():
                return self._start(order, gateway_port)
            case Terminate(instance):
                self._children.signal(instance, signal.SIGTERM)
            case Kill(instance):
                log.warning("killed", extra={"child": instance})
                self._children.signal(instance, signal.SIGKILL)
            case Announce(lifecycle):
                with contextlib.suppress(asyncio.QueueFull):
                    self._to_announce.put_nowait(lifecycle)
        return None

    async def announce(self, bus: Bus) -> None:
        """Publishes deaths as they come, so that the others learn of them now and not by the silence after them."""
        while True:
            message = await self._to_announce.get()
            with contextlib.suppress(BusError):
                await bus.publish(topics.lifecycle_of(message.service, message.instance), message)

    def _start(self, order: Start, gateway_port: int) -> Spawned | Exited:
        seat = order.seat
        if order.new_rendezvous and seat.engine is not None and self._spec.counts.leads:
            host = self._spec.hosts.master if self._spec.hosts else HOST
            self.rendezvous[seat.engine] = f"{host}:{free_port(host)}"
        where = Whereabouts(
            port=gateway_port,
            supervisor_fd=self._children.pipe,
            rendezvous=self.rendezvous.get(seat.engine) if seat.engine else None,
            arenas=self._store.arenas,
            redis_url=self._store.redis_url,
            device=order.device,
        )
        environment = {**self._access.environment(seat.service), **secret_settings(self._spec, seat, where)}
        if seat.service == "worker":
            environment |= self._network
        argv = self._launch(self._spec, seat, where)
        try:
            pid = self._children.start(seat.instance, argv, self._logs.of(seat.instance), environment)
        except OSError as error:
            log.error("not started", extra={"child": seat.instance, "error": str(error)})
            return Exited(seat.instance, NOT_EXECUTABLE)
        log.info("started", extra={"child": seat.instance, "pid": pid})
        return Spawned(seat.instance, pid)
