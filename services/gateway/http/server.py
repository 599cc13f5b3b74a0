"""uvicorn on a listening socket of our own: no process, no signal handlers; listening can stop and start again.

Connections are accepted many at a time. uvloop accepts one in each turn of its loop, and a turn lasts until a step's
tokens are written to the streams: of 200 clients that connect at once beside 60 streams, the last would wait for
seconds.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

import uvicorn
import uvicorn.lifespan.off  # which a server imports as it starts
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.http.certificates import CertificateWatcher
from services.gateway.http.connection import HEAD_TIMEOUT, Connection, ReadBudget, RequestStarts, UnflushedConnections

BACKLOG = 4096
KEEP_ALIVE = 75
"""Seconds an idle connection stays open: longer than the load balancers' usual 60, so that they close first."""
POLL = 0.02
MAX_ACCEPTS = 16
"""Connections accepted in one turn of the loop; between two turns the open streams get their tokens."""
RETRY_SECONDS = 1.0
"""Until another try where file descriptors or memory are exhausted."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger(__name__)


class RootPath:
    """The application below a path as well as at the root, as proxies pass on either. What it sees has no such path in
    it: routes and what access depends on are the same."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        """`path`: without a slash at its end; empty: there is none."""
        self._app, self._path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, as ASGI defines it."""
        if self._path and scope["type"] == "http" and scope["path"].startswith(f"{self._path}/"):
            raw = scope["raw_path"].removeprefix(self._path.encode())
            scope = {**scope, "path": scope["path"].removeprefix(self._path), "raw_path": raw}
        await self._app(scope, receive, send)


class HttpServer:
    """Owns the listening socket and, through uvicorn, every connection."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        reuse_port: bool,
        max_connections: int,
        certificates: CertificateWatcher | None,
    ) -> None:
        """`certificates`: for TLS, loaded before `listen`."""
        self._host, self.port, self._reuse_port = host, port, reuse_port
        self._certificates = certificates
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
        self._unflushed, self._turns, self._starts = UnflushedConnections(), ReadBudget(), RequestStarts()

    @property
    def listening(self) -> bool:
        """Whether connections are accepted."""
        return self._acceptor is not None

    async def listen(self) -> None:
        """Starts to accept connections; port 0 becomes a free port, and `port` holds it. Raises OSError where it is
        taken."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server(
            (self._host, self.port), family=family, backlog=BACKLOG, reuse_port=self._reuse_port
        )
        # Inherited by what is accepted. asyncio would not set it, as this socket was made without naming its protocol.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = listener.getsockname()[1]
        await self.refresh_date()
        self._acceptor = Acceptor(listener, self._connection, self._certificates)

    def _connection(self) -> Connection:
        shared = (self._unflushed, self._turns, self._starts)
        return Connection(*shared, config=self._config, server_state=self._server.server_state, app_state={})

    async def refresh_date(self) -> None:
        """Renews the Date header; to be called once a second."""
        await self._server.on_tick(0)

    def stop_listening(self) -> None:
        """Accepts no more connections (the kernel gives them to other gateways on the port), closes idle ones, and has
        the others close after their response."""
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None
        for connection in list(self._server.server_state.connections):
            connection.shutdown()

    async def close(self, timeout: float) -> None:
        """Closes everything: responses get `timeout` seconds to be read, then their connections are aborted."""
        self.stop_listening()
        state = self._server.server_state
        try:
            async with asyncio.timeout(timeout):
                while state.connections or state.tasks:
                    await asyncio.sleep(POLL)
        except TimeoutError:
            for connection in list(state.connections):
                connection.transport.abort()
            await asyncio.gather(*state.tasks, return_exceptions=True)


class Acceptor:
    """Owns a listening socket until `close`, and accepts its connections."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        certificates: CertificateWatcher | None = None,
    ) -> None:
        """Accepts at once; `protocol` makes the protocol of one client. To be called on the event loop."""
        listener.setblocking(False)
        self._listener, self._protocol, self._certificates = listener, protocol, certificates
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Accepts no more. Connections that only the kernel has accepted are dropped."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _listen(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                client, _ = self._listener.accept()
            except OSError as error:  # none waits, or its network failed: accept(2)
                if error.errno in EXHAUSTED:
                    self._pause(error)
                return
            client.setblocking(False)
            task = self._loop.create_task(self._connect(client))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def _pause(self, error: OSError) -> None:
        """Waits before another try: the listener stays ready, so that trying at once would take a whole processor."""
        log.error("cannot accept connections", extra={"error": str(error)})
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(RETRY_SECONDS, self._listen)

    async def _connect(self, client: socket.socket) -> None:
        tls = None if self._certificates is None else self._certificates.context
        try:
            await self._loop.connect_accepted_socket(
                self._protocol, client, ssl=tls, ssl_handshake_timeout=None if tls is None else HEAD_TIMEOUT
            )
        except OSError as error:  # it went away meanwhile, or the two do not agree on TLS
            log.debug("connection closed before it was accepted", extra={"error": str(error)})
            client.close()
