"""The gateway's shell: what it hears on the bus, and the HTTP server's life."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from services.gateway.config import GatewayConfig
from services.gateway.core.ring import NEEDED
from services.gateway.desk import Desk
from services.gateway.http.app import build_app
from services.gateway.http.server import HttpServer
from shared import topics
from shared.actor import Actor, Hears, Tick
from shared.bus import Bus, Undelivered
from shared.ids import GatewayId
from shared.messages.gateway import Deltas, Failed, Placed, Queued, Rejected
from shared.messages.lifecycle import Lifecycle, Phase

log = logging.getLogger(__name__)

CLOSE_PATIENCE = 1.0
"""Seconds at the very end for clients to read what was written."""


class Gateway(Actor):
    """Owns the open HTTP responses, their deadlines and attempts, and the tokens that clients already have."""

    service = "gateway"
    tick_every = 0.25

    def __init__(self, bus: Bus, config: GatewayConfig, *, listens: bool = True) -> None:
        """Without `listens` there is no port: `app` is called by whoever made this."""
        super().__init__(bus, config.instance_id())
        self._listens = listens
        self._gateway = GatewayId(self.instance)
        self.desk = Desk(bus, self._gateway, config.policy(), config.limits(), config.max_open_requests)
        self.app = build_app(
            self.desk,
            config.stream_settings(),
            max_body=config.max_body,
            keys=config.api_keys,
            cors_origins=config.cors_origins,
            parsers=config.parsers(),
        )
        self.server = HttpServer(
            self.app, config.host, config.port, reuse_port=config.reuse_port, max_connections=config.max_connections
        )
        self._ticks = 0

    def hears(self) -> Sequence[Hears[Any]]:
        return [Hears(topics.gateway_inbox(self._gateway)), *(Hears(topics.lifecycles(service)) for service in NEEDED)]

    async def set_up(self) -> None:
        await self._listen()

    async def background(self) -> None:
        await self.desk.probes.run()

    async def _listen(self) -> None:
        if not self._listens:
            return
        try:
            await self.server.listen()
        except OSError as error:
            log.error("cannot listen", extra={"port": self.server.port, "error": str(error)})
            raise SystemExit(1) from None
        log.info("listening", extra={"port": self.server.port})

    async def handle(self, message: Any) -> None:
        match message:
            case Deltas() | Placed() | Queued() | Rejected() | Failed():
                await self.desk.take(message)
            case Lifecycle():
                await self.desk.heard(message)
            case Tick():
                await self._tick(message)
            case Undelivered():
                await self.desk.undelivered(message.message)
            case _:
                raise AssertionError(message)

    async def _tick(self, tick: Tick) -> None:
        self._ticks += 1
        if self._ticks % 4 == 0:
            await self.server.refresh_date()
        await self.desk.tick(tick.now)

    async def drained(self) -> None:
        self.desk.accepting = False
        self.server.stop_listening()

    async def undrained(self) -> None:
        self.desk.accepting = True
        await self._listen()

    async def tear_down(self) -> None:
        self.desk.stop()
        await self.server.close(CLOSE_PATIENCE)

    def is_idle(self) -> bool:
        return self.desk.idle

    def wanted_phase(self) -> Phase:
        return "ready" if self.desk.not_serving() is None else "starting"

    def load(self) -> int:
        return len(self.desk)
