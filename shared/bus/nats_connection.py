"""Opens a bus over NATS: where its servers are, who we are there, and how long they are waited for."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import math
import ssl
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from shared.bus import BusError
from shared.bus.liveness import LivenessClock
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_client import Client, EncryptedClient, PromptClient, nats
from shared.telemetry.metrics import BUS_CONNECTED, BUS_DROPPED
from shared.topics import inbox_prefix

log = logging.getLogger(__name__)

PENDING_BYTES = 32 * 2**20
"""Bytes buffered for sending while the server is unreachable; publishing beyond them raises."""
CANCEL_AGAIN = 0.1
"""Seconds from one cancellation to the next of a task that goes on."""
RECONNECT_WAIT = 0.1
ANSWER_SECONDS = 2
"""For the first answer of a server that has let us in."""
GRACE_AFTER_RECONNECT = 2.0
SAME_ERROR_PAUSE = 60.0
"""Seconds in which an error that comes again is not logged again: each attempt to connect has one."""


class NatsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where the bus is and who we are there."""

    servers: tuple[str, ...]
    namespace: str = "baton"
    name: str = ""
    """Shown in the server's monitoring; the instance."""
    user: str | None = None
    password: str | None = None
    credentials: Path | None = None
    """A NATS .creds file."""
    tls_ca: Path | None = None
    """What the server's certificate is checked with, in place of the system's authorities."""
    connect_timeout: float = 10.0
    """Seconds until a first connection is given up."""
    refused_timeout: float | None = None
    """Seconds until it is given up where nobody listens, or the server does not know us; default: `connect_timeout`."""

    @property
    def is_encrypted(self) -> bool:
        """Whether the server must offer TLS: an authority or a `tls://` URL says so."""
        return self.tls_ca is not None or any(server.startswith("tls://") for server in self.servers)


def _allow_websockets() -> None:
    """Raises BusError where aiohttp is not installed."""
    transport: Any = nats.aio.transport
    try:
        transport.aiohttp = importlib.import_module("aiohttp")
        transport.multidict = importlib.import_module("multidict")
    except ImportError:
        raise BusError("a NATS server's WebSocket needs aiohttp, which is not installed") from None


class _ClosedAtOnce(Exception):
    """The server has closed a connection right behind the handshake; the text is why."""


async def connect(options: NatsOptions) -> NatsBus:
    """A bus on the first server that answers. Raises BusError, naming the servers, when none does in time.

    A server that takes over other users just now may let a client in and close the connection in the next moment:
    then it is tried again for as long as where the server does not know us."""
    if any(server.startswith(("ws://", "wss://")) for server in options.servers):
        _allow_websockets()
    until = time.monotonic() + (options.refused_timeout or options.connect_timeout)
    while True:
        try:
            return await _connect_once(options)
        except _ClosedAtOnce as closed:
            if time.monotonic() >= until:
                raise BusError(f"no NATS server at {', '.join(options.servers)}: {closed}") from None
            await asyncio.sleep(RECONNECT_WAIT)


async def _connect_once(options: NatsOptions) -> NatsBus:
    """Raises _ClosedAtOnce, BusError."""
    liveness = LivenessClock(time.monotonic, GRACE_AFTER_RECONNECT)
    last_error: list[Exception] = []
    refusals: set[bool] = set()
    closed = asyncio.Event()
    said, said_at = "", -math.inf

    async def failed(error: Exception) -> None:
        nonlocal said, said_at
        last_error[:] = [error]
        refusals.add(_is_refusal(error))
        if isinstance(error, nats.errors.SlowConsumerError):
            BUS_DROPPED.labels("slow_consumer").inc()
        refused = "permissions violation" in str(error).lower()
        if refused or repr(error) != said or time.monotonic() - said_at >= SAME_ERROR_PAUSE:
            said, said_at = repr(error), time.monotonic()
            log.log(logging.ERROR if refused else logging.WARNING, "bus error", extra={"error": said})

    async def ended() -> None:
        closed.set()

    callbacks: dict[str, Any] = {"error_cb": failed, "closed_cb": ended, **_outages(liveness)}
    client = EncryptedClient() if options.is_encrypted else PromptClient()
    try:
        connecting = client.connect(**_arguments(options), **callbacks)
        await _in_time(connecting, options.connect_timeout, options.refused_timeout, lambda: refusals == {True})
    except (OSError, TimeoutError, nats.errors.Error) as error:
        await client.close()
        why = last_error[0] if last_error and isinstance(error, TimeoutError) else error
        said = str(why) or f"no answer within {options.connect_timeout:g} s; does it hang, or is its machine too busy?"
        raise BusError(f"no NATS server at {', '.join(options.servers)}: {said}") from None
    bus = NatsBus(client, options.namespace, liveness)
    with contextlib.suppress(nats.errors.ConnectionClosedError):
        await bus.listen_for_undelivered()
        await _heard(client, closed)
    if client.is_closed:
        raise _ClosedAtOnce(str(client.last_error or "it has closed the connection"))
    BUS_CONNECTED.set(1)
    return bus


async def _heard(client: Client, closed: asyncio.Event) -> None:
    """Returns once the server has answered behind the handshake, or the connection is `closed`; and after
    ANSWER_SECONDS, as a server that is slow is none that refuses."""
    answered = asyncio.create_task(client.flush(timeout=ANSWER_SECONDS))
    ending = asyncio.create_task(closed.wait())
    try:
        await asyncio.wait({answered, ending}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (answered, ending):
            task.cancel()
        await asyncio.gather(answered, ending, return_exceptions=True)


def _outages(liveness: LivenessClock) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
    """What the client calls when it has lost the server, and when it is back."""

    async def disconnected() -> None:
        liveness.disconnected()
        BUS_CONNECTED.set(0)
        log.warning("bus away")

    async def reconnected() -> None:
        liveness.reconnected()
        BUS_CONNECTED.set(1)
        log.warning("bus back")

    return {"disconnected_cb": disconnected, "reconnected_cb": reconnected}


def _arguments(options: NatsOptions) -> dict[str, Any]:
    """What the client is told, but for its callbacks."""
    return {
        "servers": list(options.servers),
        "name": options.name,
        "user": options.user,
        "password": options.password,
        "inbox_prefix": inbox_prefix(options.user),
        "user_credentials": str(options.credentials) if options.credentials else None,
        "tls": ssl.create_default_context(cafile=str(options.tls_ca)) if options.tls_ca else None,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": RECONNECT_WAIT,
        "connect_timeout": 2,
        "ping_interval": 5,
        "max_outstanding_pings": 2,
        "pending_size": PENDING_BYTES,
    }


def _is_refusal(error: Exception) -> bool:
    """Whether trying on changes little: nobody listens, or we are not let in. A server that is slow gives no answer."""
    if isinstance(error, TimeoutError):
        return False
    return isinstance(error, OSError) or "authorization" in str(error).lower()


async def _in_time(
    connecting: Coroutine[Any, Any, None],
    seconds: float,
    refused_seconds: float | None = None,
    refused: Callable[[], bool] = lambda: False,
) -> None:
    """Ends when the client has connected, or after that time: after `refused_seconds` where it is `refused` then.
    Raises TimeoutError.

    The client may take a cancellation for one of its own tasks' and go on trying: it is cancelled until it ends.
    """
    task = asyncio.create_task(connecting)
    first = seconds if refused_seconds is None else min(seconds, refused_seconds)
    try:
        done, _ = await asyncio.wait({task}, timeout=first)
        if not done and first < seconds and not refused():
            done, _ = await asyncio.wait({task}, timeout=seconds - first)
        if not done:
            raise TimeoutError
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_AGAIN)
        if not task.cancelled():
            task.exception()  # seen, where it is not raised below
    await task
