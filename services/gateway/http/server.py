"""uvicorn without its process: sockets of our own, no signal handlers, listening that can end and begin again."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp

from services.gateway.http.acceptor import Acceptor
from services.gateway.http.connection import Connection

BACKLOG = 4096
KEEP_ALIVE = 75
"""Seconds an idle connection stays open: longer than the load balancers' usual 60, so that they close first."""
POLL = 0.02


class HttpServer:
    """Owns the listening socket and, through uvicorn, every connection."""

    def __init__(self, app: ASGIApp, host: str, port: int, *, reuse_port: bool, max_connections: int) -> None:
        self._host, self.port, self._reuse_port = host, port, reuse_port
        self._config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
            limit_concurrency=max_connections,
            backlog=BACKLOG,
        )
        self._config.load()
        self._server = uvicorn.Server(self._config)
        self._acceptor: Acceptor | None = None

    @property
    def listening(self) -> bool:
        return self._acceptor is not None

    async def listen(self) -> None:
        """Takes connections; port 0 becomes a free one and stays it. Raises OSError where the port is taken."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server(
            (self._host, self.port), family=family, backlog=BACKLOG, reuse_port=self._reuse_port
        )
        # Inherited by what is accepted. asyncio would not set it, as this socket was made without naming its protocol.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = listener.getsockname()[1]
        await self.refresh_date()
        self._acceptor = Acceptor(listener, self._connection)

    def _connection(self) -> Connection:
        return Connection(config=self._config, server_state=self._server.server_state, app_state={})

    async def refresh_date(self) -> None:
        """Renews the Date header; once a second is often enough."""
        await self._server.on_tick(0)

    def stop_listening(self) -> None:
        """Takes no more connections (the kernel gives them to other gateways on the port), closes idle ones, and
        has the others close after the answer that they wait for."""
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None
        for connection in list(self._server.server_state.connections):
            connection.shutdown()

    async def close(self, patience: float) -> None:
        """Ends what is left: answers get `patience` seconds to be read, then their connections are cut."""
        self.stop_listening()
        state = self._server.server_state
        try:
            async with asyncio.timeout(patience):
                while state.connections or state.tasks:
                    await asyncio.sleep(POLL)
        except TimeoutError:
            for connection in list(state.connections):
                connection.transport.abort()
            await asyncio.gather(*state.tasks, return_exceptions=True)
